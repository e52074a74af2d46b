"""What the tests of all logs on servers have in common: each store's own files derive from it."""
