"""A project that uses catnat: a head and an encoder of its own."""
