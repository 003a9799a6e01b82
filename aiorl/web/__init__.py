"""Parts of servers, shared by serving and the live page: HTTP and WebSocket, limits, tokens, TLS,
an access log.

    app = App() app.add("GET", "/live", is_live, is_open=True)   # async def is_live(request:
    Request) -> Response; no token app.add("POST", "/models/{name}", answer)          #
    request.names["name"], await request.body() app.add("WEBSOCKET", "/stream", talk)              #
    async def talk(socket: WebSocket) -> None app.add_asked("POST", "/act", act)                 #
    def act(said: dict) -> dict or Reply: objects in JSON

    add_web_options(parser, port=8000)           # --host, --port, --token-file, --insecure,
    --tls-cert, ... await serve(app, web_options(found, "it"))    # until a signal; then it answers
    accepted requests, and closes async with WebServer(app, options).running() as server: ...  # the
    same as a part of a program Ports().open(run_dir, 8265, None, None)      # the page of a run, by
    a process of its own

`json_response` and `Response(body)` or `Response(stream=...)` make answers; a stream ends when its
client leaves or the server closes (`app.closing`). Raise `Refusal(400, "one sentence")` in a
handler to answer {"error": sentence}. Any other error is logged, and answered by a 500 without its
text.

The modules need the packages of the extra `serve`; `want_web` raises the error that says how to
install them.
"""
