"""The small runs of tests/train are trained here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "train"))
