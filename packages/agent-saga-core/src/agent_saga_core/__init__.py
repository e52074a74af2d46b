"""Transactions for AI agents' tool calls."""
