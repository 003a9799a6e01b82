"""Parts of servers, shared by serving and the live page: HTTP and WebSocket, limits, tokens, TLS,
an access log.

    app = App()
    # async def is_live(request: Request) -> Response; it needs no token
    app.add("GET", "/live", is_live, is_open=True)
    # request.names["name"], await request.body()
    app.add("POST", "/models/{name}", answer)
    # async def talk(socket: WebSocket) -> None
    app.add("WEBSOCKET", "/stream", talk)
    # def act(body: dict) -> dict or Reply: objects in JSON
    app.add_json_route("POST", "/act", act)

    # --host, --port, --token-file, --insecure, --tls-cert, ...
    add_web_options(parser, port=8000)
    # until a signal; then it answers accepted requests, and closes
    await serve(app, web_options(options, "it"))
    # the same as a part of a program
    async with WebServer(app, options).running() as server: ...
    # the page of a run, by a process of its own
    Ports().open(run_dir, page=8265)

`json_response` and `Response(body)` or `Response(stream=...)` make answers; a stream ends when its
client leaves or the server closes (`app.closing`). Raise `Refusal(400, "one sentence")` in a
handler to answer {"error": sentence}. Any other error is logged, and answered by a 500 without its
text.

The modules need the packages of the extra `serve`; `want_web` raises the error that says how to
install them.
"""
