// CartPole-v1 (Barto, Sutton and Anderson 1983; constants of Gymnasium), played by clients of a run until it is over.
import { PolicyClient } from "./client.mjs";

const random = () => Math.random() * 0.1 - 0.05;

function step([x, v, angle, turn], action) {
  const force = action === 1 ? 10 : -10, cos = Math.cos(angle), sin = Math.sin(angle);
  const push = (force + 0.05 * turn * turn * sin) / 1.1;
  const turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - (0.1 * cos * cos) / 1.1));
  const speeding = push - (0.05 * turning * cos) / 1.1;
  return [x + 0.02 * v, v + 0.02 * speeding, angle + 0.02 * turn, turn + 0.02 * turning];
}

async function play(client) {
  for (;;) {
    try {
      const game = await client.session();
      for (;;) {
        let state = [random(), random(), random(), random()], steps = 0, isOver = false;
        while (!isOver && steps < 500) {
          state = step(state, await game.act(state, steps ? 1 : 0));
          steps += 1;
          isOver = Math.abs(state[0]) > 2.4 || Math.abs(state[2]) > (12 * Math.PI) / 180;
        }
        await game.end(state, 1, !isOver);
      }
    } catch (error) {
      if (error.status !== 410 && error.status !== 503) return; // the run is over
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  }
}

const client = new PolicyClient(process.argv[2]);
await Promise.all(Array.from({ length: Number(process.argv[3]) }, () => play(client)));
