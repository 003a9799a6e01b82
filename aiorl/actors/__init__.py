"""Actors: objects of users' classes, each in a process of its own, and calls of their methods.

The way of a call: a handle (`calls`) packs the arguments (`values`), the session of the hub
(`hub_session`) passes the call to the actor's process, whose session (`actor_session`) hands it to
the host of the object (`host`). The sessions know no sockets; `hub` and `host` drive them over the
endpoints of `aiorl.net.transport`.
"""
