"""The demo: a payments-and-booking service in its own process, its client, and the acts played on it."""
