"""The write-ahead log: where the sagas' records live, who may write them, and when they are durable."""
