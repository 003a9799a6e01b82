// The page: plays one episode after the other by the policy that the form names.
import { CartPole, STEP_S } from "./cartpole.js";
import { HttpPolicy, OnnxPolicy, SocketPolicy } from "./policies.js";

const form = document.querySelector("form");
const canvas = document.querySelector("canvas");
const game = new CartPole();
const returns = []; // of the last episodes
let isPlaying = false;

const show = (id, text) => (document.getElementById(id).textContent = text);
const waiting = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

function open() {
  const { kind, file, server, token } = Object.fromEntries(new FormData(form));
  const url = server.replace(/\/+$/, "");
  if (kind === "onnx") return OnnxPolicy.open(file);
  return kind === "http" ? HttpPolicy.open(url, token) : SocketPolicy.open(url, token);
}

// Open a policy; a run in training has room for a game once its first update is compiled.
async function openWhenReady() {
  for (;;) {
    try {
      return await open();
    } catch (error) {
      if (error.status !== 503 || !isPlaying) throw error;
      show("problem", error.message);
      await waiting(1);
    }
  }
}

async function playEpisode(policy) {
  game.reset();
  while (isPlaying && !game.isOver) {
    const began = performance.now();
    game.step(await policy.act(game.state, game.steps ? 1 : 0));
    const seconds = (performance.now() - began) / 1000;
    if (!form.elements.fast.checked) await waiting(Math.max(0, STEP_S - seconds));
    else if (game.steps % 50 === 0) await waiting(0); // the page is drawn meanwhile
    game.draw(canvas);
    show("steps", game.steps);
    show("time", `${(1000 * seconds).toFixed(1)} ms`);
  }
  if (!game.isOver) return;
  await policy.end(game.state, 1, !game.hasFallen);
  returns.unshift(game.steps);
  returns.splice(8);
  show("returns", returns.join(", "));
}

async function play() {
  isPlaying = true;
  form.querySelector("button").textContent = "Stop";
  show("problem", "");
  try {
    const policy = await openWhenReady();
    show("problem", "");
    while (isPlaying) await playEpisode(policy);
    await policy.close();
  } catch (error) {
    show("problem", error.message);
  }
  isPlaying = false;
  form.querySelector("button").textContent = "Play";
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (isPlaying) isPlaying = false;
  else play();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => game.draw(canvas));
game.draw(canvas);
