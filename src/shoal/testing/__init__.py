"""For those who test parts: `check_part(MyPart())` runs every law that one part can keep alone."""

from shoal.testing.laws import check_pair, check_part

__all__ = ["check_pair", "check_part"]
