"""The simulation is a folder of the repository, not a package that is installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
