"""Real devices: what travels between them and the server, what each of them does, and the processes that carry it."""
