"""The PostgreSQL log, on real servers."""
