"""The job's own connections: addresses, sockets, the token of a job, and messages whose fields are checked."""
