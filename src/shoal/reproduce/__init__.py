"""Tables of papers: one TOML file each, the published figures, and what puts measured ones beside them."""
