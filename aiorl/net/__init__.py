"""Network code: messages and their bytes (wire), the rules of the conversation (protocol) and
sockets (transport).
"""
