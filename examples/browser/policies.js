// Policies behind one interface: `act(observation, reward)` returns the action, and `end(observation, reward,
// isTruncated)` ends an episode. The reward is that of the step before.

const UNREACHED = "The server can't be reached, or does not let this page in.";

// A policy in the page itself: a file that `aiorl export` has written.
export class OnnxPolicy {
  static async open(file) {
    const ort = await import("onnxruntime-web"); // 14 MB, which the other ways do without
    ort.env.wasm.numThreads = 1; // several threads need headers that few servers of files send
    return new OnnxPolicy(ort, await ort.InferenceSession.create(file));
  }

  constructor(ort, model) {
    this.ort = ort;
    this.model = model;
  }

  async act(observation) {
    const obs = new this.ort.Tensor("float32", observation, [1, observation.length]);
    const { action } = await this.model.run({ obs }, ["action"]);
    return Number(action.data[0]);
  }

  async end() {}

  async close() {
    await this.model.release();
  }
}

// A session of `aiorl serve`, or of a run that learns from it, over HTTP.
export class HttpPolicy {
  static async open(url, token) {
    const policy = new HttpPolicy(url, token);
    policy.session = (await policy.ask("POST", "/sessions", {})).session;
    return policy;
  }

  constructor(url, token) {
    this.url = url;
    this.headers = { "content-type": "application/json", ...(token && { authorization: `Bearer ${token}` }) };
  }

  async ask(method, path, keys) {
    const request = { method, headers: this.headers, body: JSON.stringify(keys) };
    // a browser says no more: the server is not there, or does not let this page in
    const response = await fetch(this.url + path, request).catch(() => ({ json: () => ({ error: UNREACHED }) }));
    return checked(await response.json(), response.status);
  }

  async act(observation, reward) {
    return (await this.ask("POST", "/act", { session: this.session, observation, reward })).action;
  }

  end(observation, reward, isTruncated) {
    return this.ask("POST", `/sessions/${this.session}/end`, { observation, reward, truncated: isTruncated });
  }

  close() {
    return this.ask("DELETE", `/sessions/${this.session}`);
  }
}

// The same over a WebSocket, which costs less for each request.
export class SocketPolicy {
  static async open(url, token) {
    // a page can't send headers with a WebSocket: the token is the name of a protocol
    const protocols = token ? ["aiorl", `token.${encodeURIComponent(token)}`] : [];
    const socket = new WebSocket(`${url.replace(/^http/, "ws")}/ws`, protocols);
    await new Promise((resolve, reject) => {
      socket.onopen = resolve;
      socket.onclose = () => reject(new Error(UNREACHED));
    });
    const policy = new SocketPolicy(socket);
    try {
      policy.session = (await policy.ask("open", {})).session;
    } catch (error) {
      socket.close();
      throw error;
    }
    return policy;
  }

  constructor(socket) {
    this.socket = socket;
    this.answers = new Map(); // id of a request -> what to do with its answer
    this.lastId = 0;
    socket.onmessage = (message) => {
      const answer = JSON.parse(message.data);
      this.answers.get(answer.id).resolve(answer);
      this.answers.delete(answer.id);
    };
    socket.onclose = () => {
      for (const { reject } of this.answers.values()) reject(new Error("The server is gone."));
    };
  }

  async ask(what, keys) {
    this.lastId += 1;
    const answer = new Promise((resolve, reject) => this.answers.set(this.lastId, { resolve, reject }));
    this.socket.send(JSON.stringify({ id: this.lastId, do: what, ...keys }));
    const { status, ...fields } = await answer;
    return checked(fields, status);
  }

  async act(observation, reward) {
    return (await this.ask("act", { session: this.session, observation, reward })).action;
  }

  end(observation, reward, isTruncated) {
    return this.ask("end", { session: this.session, observation, reward, truncated: isTruncated });
  }

  async close() {
    await this.ask("close", { session: this.session });
    this.socket.close();
  }
}

// A refusal becomes an error with its status of HTTP; 503 means that the server may answer in a second.
function checked(answer, status) {
  if (answer.error) throw Object.assign(new Error(answer.error), { status });
  return answer;
}
