"""Event streams from an ingress to Serve's proxy over a socket, beside Ray.

Serve hands every chunk of an answer to its proxy as an object of a Ray generator, which costs both
processes several times what the chunk itself does. Here each proxy listens (`proxy.py`, a
middleware that `connections.guard` installs) and puts its address into the request's scope, which
no client can reach. An ingress (`ingress.py`) that answers such a request with an event stream
connects to the proxy once and sends the chunks of all streams there, those of one turn of its event
loop as one frame. What is waiting for a client goes out as one piece; nothing waits for more.

Serve's call stays pending for the whole answer, and its status, its end, its failures and the
client's disconnect take Serve's way. Where a proxy does not listen, so do the chunks.
"""
