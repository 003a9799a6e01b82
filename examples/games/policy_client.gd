# Client of `aiorl serve`, and of runs that learn from games, for Godot 4: a node, or an autoload.
# Several games can share it. Their requests are under way at the same time.
#
#     var session: String = await client.open("ws://localhost:8000")
#     var action = await client.act(session, [0.0, 0.1, 0.0, -0.1], 0.0)
#     await client.end(session, [0.0, 0.3, 0.0, -0.4], 1.0, false)
class_name PolicyClient
extends Node

const BUSY := 503

var _socket := WebSocketPeer.new()
var _answers := {}
var _last_id := 0


func _process(_delta: float) -> void:
	_socket.poll()
	while _socket.get_available_packet_count() > 0:
		var answer: Dictionary = JSON.parse_string(_socket.get_packet().get_string_from_utf8())
		_answers[int(answer["id"])] = answer


# Connect, unless this is done, and return a session; "" if the server can't be reached or refuses.
func open(url: String, token := "") -> String:
	if _socket.get_ready_state() == WebSocketPeer.STATE_CLOSED:
		if token != "":
			_socket.handshake_headers = PackedStringArray(["Authorization: Bearer " + token])
		_socket.connect_to_url(url + "/ws")
	while _socket.get_ready_state() == WebSocketPeer.STATE_CONNECTING:
		await get_tree().process_frame
	var answer := await ask("open", {})
	while answer.get("status") == BUSY:  # the run isn't ready yet
		await get_tree().create_timer(1.0).timeout
		answer = await ask("open", {})
	return answer.get("session", "")


# Return the action for an observation, or null after an error. The reward is that since the last
# request.
func act(session: String, observation: Variant, reward: float) -> Variant:
	var keys := {"session": session, "observation": observation, "reward": reward}
	var answer := await ask("act", keys)
	return answer.get("action")


# End the episode; it is truncated if it could have gone on. The next act begins another one.
func end(session: String, observation: Variant, reward: float, truncated: bool) -> void:
	var keys := {"session": session, "observation": observation, "reward": reward}
	keys["truncated"] = truncated
	await ask("end", keys)


# Send a request and return its answer; after an error, that has the keys "status" and "error".
func ask(what: String, keys: Dictionary) -> Dictionary:
	_last_id += 1
	var id := _last_id
	keys["id"] = id
	keys["do"] = what
	if _socket.get_ready_state() == WebSocketPeer.STATE_OPEN:
		_socket.send_text(JSON.stringify(keys))
	while not _answers.has(id):
		if _socket.get_ready_state() != WebSocketPeer.STATE_OPEN:
			push_error("the server is gone")
			return {"status": 0, "error": "the server is gone"}
		await get_tree().process_frame
	var answer: Dictionary = _answers[id]
	_answers.erase(id)
	if answer.has("error") and answer.get("status") != BUSY:
		push_error(answer["error"])
	return answer
