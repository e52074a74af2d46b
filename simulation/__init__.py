"""The engine on a schedule: whole sagas, their crashes and recoveries, in one thread, each run decided by a seed.

`docs/simulation.md` says what is simulated, what is checked, and what is not.
"""
