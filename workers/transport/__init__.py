"""Messages between processes: the wire format, framed sockets, and the step channel."""
