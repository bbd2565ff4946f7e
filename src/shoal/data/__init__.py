"""Data sets and the ways to spread them over devices."""
