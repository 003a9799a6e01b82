// CartPole-v1 (Barto, Sutton and Anderson 1983), with the constants of Gymnasium, and its picture.

const FORCE = 10; // N
const GRAVITY = 9.8; // m/s^2
const MASS_OF_POLE = 0.1; // kg; the cart has 1
const MASS = 1.1; // kg, of both
const HALF_LENGTH = 0.5; // m, of the pole
export const STEP_S = 0.02;
const MAX_PLACE = 2.4; // m from the middle
const MAX_ANGLE = (12 * Math.PI) / 180;
const MAX_STEPS = 500;

export class CartPole {
  constructor() {
    this.reset();
  }

  reset() {
    const small = () => Math.random() * 0.1 - 0.05;
    this.state = [small(), small(), small(), small()]; // place, speed, angle, turn
    this.steps = 0;
    return this.state;
  }

  // Push the cart to the left (0) or right (1) for a step. Each step earns a reward of 1.
  step(action) {
    const [place, speed, angle, turn] = this.state;
    const sin = Math.sin(angle);
    const cos = Math.cos(angle);
    const push = ((action === 1 ? FORCE : -FORCE) + MASS_OF_POLE * HALF_LENGTH * turn * turn * sin) / MASS;
    const turning = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4 / 3 - (MASS_OF_POLE * cos * cos) / MASS));
    const speeding = push - (MASS_OF_POLE * HALF_LENGTH * turning * cos) / MASS;
    this.state = [place + STEP_S * speed, speed + STEP_S * speeding, angle + STEP_S * turn, turn + STEP_S * turning];
    this.steps += 1;
    return this.state;
  }

  get hasFallen() {
    return Math.abs(this.state[0]) > MAX_PLACE || Math.abs(this.state[2]) > MAX_ANGLE;
  }

  get isOver() {
    return this.hasFallen || this.steps >= MAX_STEPS;
  }

  draw(canvas) {
    const [place, , angle] = this.state;
    const colors = getComputedStyle(canvas);
    const drawing = canvas.getContext("2d");
    const metre = canvas.width / (2 * MAX_PLACE + 1);
    const ground = canvas.height * 0.8;
    const middle = canvas.width / 2 + place * metre;
    drawing.clearRect(0, 0, canvas.width, canvas.height);
    drawing.fillStyle = colors.getPropertyValue("--soft");
    drawing.fillRect(0, ground, canvas.width, 2);
    for (const end of [-MAX_PLACE, MAX_PLACE]) drawing.fillRect(canvas.width / 2 + end * metre - 1, ground - 12, 2, 24);
    drawing.fillStyle = colors.getPropertyValue("--ink");
    drawing.fillRect(middle - 0.35 * metre, ground - 0.3 * metre, 0.7 * metre, 0.3 * metre);
    drawing.save();
    drawing.translate(middle, ground - 0.3 * metre);
    drawing.rotate(angle);
    drawing.fillStyle = colors.getPropertyValue("--accent");
    drawing.fillRect(-0.06 * metre, -2 * HALF_LENGTH * metre, 0.12 * metre, 2 * HALF_LENGTH * metre);
    drawing.restore();
  }
}
