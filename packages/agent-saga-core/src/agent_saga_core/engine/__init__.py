"""The protocol, as generators that yield effects: decides, does nothing.

One file per phase: `step` (a call from its lookup to its outcome), `settle` (an UNKNOWN step to a known end),
`unwind` (compensations, in order), `finish` (the end of a scope), `reopen` (an id that the log already knows).
`effects` says what a generator may ask for, `run` what it may know beside the records. `docs/design.md` has the rules.
"""
