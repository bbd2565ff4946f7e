"""For those who test parts: `check_part(MyPart())` runs every law that one part can keep alone; `toy` is a run in
miniature that gives them rounds, devices, local steps and replies made by hand."""

from shoal.testing.laws import check_pair, check_part
from shoal.testing.toy import Toy, toy

__all__ = ["Toy", "check_pair", "check_part", "toy"]
