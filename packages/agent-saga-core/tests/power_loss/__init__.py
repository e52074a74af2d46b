"""Power loss: what logs do to a disk is recorded, and every disk that a loss of power may leave is opened again.

`recording` notes what the file log asked of the operating system and what it told its caller; `disk` says what may
survive of that; `workloads` are the recordings; `replay` opens each surviving disk and holds it against what was told.
"""
