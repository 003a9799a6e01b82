// The page: a list of runs with their curves next to each other, and a view of one run that follows it.
import { ago, Chart, clearCharts, COLOURS, count, el, isNumber, list, map, percent, short, span, table, text } from "./parts.js";

const PHASES = {
  training: "training", starting: "starting", waiting: "waiting", silent: "silent", ended: "ended", failed: "failed",
  gone: "gone", unknown: "not running",
};
const STEPS = "timesteps_total", SECONDS = "time_total_s", RETURN = "episode_reward_mean";
const EVALUATION = "evaluation/episode_reward_mean";
const LOSS = /loss|entropy|(^|_|\/)kl$|grad_gnorm|explained_var|q_mean|td_error|alpha$/;
const OVER = ["ended", "failed", "gone"];
// stop criterion -> its words, its figure, and the rate of the figure if it grows steadily; others show their value alone
const STOPS = {
  stop_return: ["return", "episode_reward_mean_last_100"], stop_evaluation_return: ["evaluation", EVALUATION],
  stop_timesteps: ["env steps trained", "env_steps_trained_total", (figures) => figures.trained_steps_per_s],
  stop_time_s: ["time", "time_total_s", () => 1],
};
// Figures of a policy's health: words, key, text, lowest and highest usual value, and what to do beyond these.
const HEALTH = [
  ["Entropy, share of the largest", "health/entropy_share", percent, 0.001, Infinity,
    "The policy explores no more. That is fine if its return is high; otherwise lower lr, or raise entropy_coeff."],
  ["KL divergence of an update", "learner/kl", short, 0, 0.2, "Updates change the policy much: lower lr or num_sgd_iter. Above 1, they destroy it."],
  ["Clipped share of the rows", "learner/clip_fraction", percent, 0, 0.4, "Updates go as far as they may: lower lr or num_sgd_iter."],
  ["Explained variance of the values", "learner/vf_explained_var", short, 0, 1,
    "The values are worse than a constant. That is usual at first; later raise train_batch_size, or lower lr."],
];
const SECTIONS = { "": "Overview", workers: "Workers", log: "Log", config: "Config" };
const MAX_POINTS = 6000;

const main = document.getElementById("main");
const link = document.getElementById("link");
const HERE = location.origin + location.pathname; // a password in the page's address may not be in those of requests
let byTime = false;
let view = { close() {} };

async function get(path, query = {}) {
  const answer = await fetch(`${HERE}api/${path}?${new URLSearchParams(query)}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(text(found.error) || `The server answered ${answer.status}.`);
  return found;
}

function say(words, isBad = false) {
  link.textContent = words;
  link.className = isBad ? "bad" : "";
}

// Follow the server's events; the browser connects again by itself.
function follow(query, handlers, isOver = () => false) {
  const source = new EventSource(`${HERE}api/events?${new URLSearchParams(query)}`);
  source.onopen = () => say("Live");
  source.onerror = () => (isOver() ? say("The run is over, and so is its page") : say("No connection to the server; trying again", true));
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  }
  return source;
}

// Run a function at most once in a while, and always after the last call.
function seldom(wait, run) {
  let timer = null;
  const call = () => {
    timer ??= setTimeout(() => {
      timer = null;
      run();
    }, wait);
  };
  call.stop = () => clearTimeout(timer);
  return call;
}

const badge = (phase) => el("span", { class: `badge ${phase in PHASES ? phase : "unknown"}` }, PHASES[phase] ?? "unknown");
const runLink = (...parts) => `#/run/${parts.filter(Boolean).map(encodeURIComponent).join("/")}`;

function choice(label, options, value, change) {
  const box = el("select", { onchange: () => change(box.value) },
    Object.entries(options).map(([each, words]) => el("option", { value: each, selected: each === value }, words)));
  return el("label", {}, label, " ", box);
}

const axisChoice = (change) => choice("Over", { steps: "env steps", seconds: "training time" }, byTime ? "seconds" : "steps", (value) => {
  byTime = value === "seconds";
  change();
});

const returnText = (figures) => (isNumber(figures.episode_reward_mean) ? short(figures.episode_reward_mean) : "–");

// All runs ----------------------------------------------------------------------------------------------------

class AllRuns {
  constructor(first) {
    this.words = "";
    this.order = ["changed", -1];
    this.metric = RETURN;
    this.hidden = new Set();
    this.rows = el("div");
    this.charts = el("div");
    this.note = el("p", { class: "soft" });
    const filter = el("input", { type: "search", placeholder: "name, environment, algorithm", oninput: () => {
      this.words = filter.value.toLowerCase();
      this.showRows();
    } });
    this.metricBox = el("select", { onchange: () => {
      this.metric = this.metricBox.value;
      this.compare();
    } });
    this.filterBar = el("div", { class: "bar" }, el("h1", {}, "Runs"), el("label", {}, "Filter ", filter));
    this.compareBar = el("div", { class: "bar" }, el("h2", {}, "Next to each other"),
      el("label", {}, "Figure ", this.metricBox), axisChoice(() => this.compare()));
    main.replaceChildren(this.filterBar, this.rows, this.compareBar, this.note, this.charts);
    this.compareSoon = seldom(5000, () => this.compare());
    this.source = follow({}, { runs: (found) => this.update(found) });
    this.update(first);
    this.compare();
  }

  close() {
    this.source.close();
    this.compareSoon.stop();
    this.isClosed = true;
  }

  update(found) {
    const before = JSON.stringify(list(this.runs).map((run) => run.figures.timesteps_total));
    this.runs = list(found.runs);
    this.root = text(found.root);
    document.getElementById("where").textContent = this.root;
    this.showRows();
    const now = JSON.stringify(this.runs.map((run) => run.figures.timesteps_total));
    if (before !== now && before !== "[]") this.compareSoon();
  }

  sortBy(key) {
    this.order = [key, this.order[0] === key ? -this.order[1] : key === "name" ? 1 : -1];
    this.showRows();
    this.rows.querySelector(`button[data-key="${key}"]`)?.focus();
  }

  showRows() {
    this.filterBar.lastChild.hidden = this.compareBar.hidden = !this.runs.length;
    if (!this.runs.length) {
      this.rows.replaceChildren(el("div", { class: "empty" }, el("p", {}, "There are no runs here yet."),
        el("p", {}, "Begin one in another terminal, and it appears by itself:"),
        el("pre", {}, `aiorl train --env CartPole-v1 --run-dir ${this.root}/mine`)));
      return;
    }
    const columns = {
      name: ["Run", (run) => run.name], phase: ["State", (run) => run.phase], env: ["Environment", (run) => run.env],
      algo: ["Algorithm", (run) => run.algo], seed: ["Seed", (run) => run.seed],
      mean: ["Return", (run) => run.figures.episode_reward_mean], steps: ["Env steps", (run) => run.figures.timesteps_total],
      rate: ["Trained/s", (run) => run.figures.trained_steps_per_s], time: ["Time", (run) => run.figures.time_total_s],
      changed: ["Last change", (run) => run.changed],
    };
    const [key, direction] = this.order;
    const value = columns[key][1];
    const rank = (run) => value(run) ?? (direction < 0 ? -Infinity : Infinity);
    const shown = this.runs
      .filter((run) => `${run.name} ${run.env} ${run.algo} ${run.phase}`.toLowerCase().includes(this.words))
      .sort((a, b) => direction * (typeof rank(a) === "string" ? rank(a).localeCompare(rank(b), "en", { numeric: true }) : rank(a) - rank(b) || 0));
    const head = Object.entries(columns).map(([name, [label]]) =>
      el("th", { scope: "col", "aria-sort": name !== key ? null : direction > 0 ? "ascending" : "descending" },
        el("button", { type: "button", "data-key": name, onclick: () => this.sortBy(name) }, label)));
    const rows = shown.map((run) => {
      const figures = map(run.figures);
      return [
        el("a", { href: runLink(run.name) }, run.name), badge(run.phase), run.env, run.algo, text(run.seed) || "–", returnText(figures),
        short(figures.timesteps_total), short(figures.trained_steps_per_s), span(figures.time_total_s), ago(run.changed),
      ];
    });
    const focused = document.activeElement?.getAttribute("href");
    const place = this.rows.firstChild?.scrollTop ?? 0;
    this.rows.replaceChildren(table(`${shown.length} runs`, head, rows, { class: "cards runs" }));
    this.rows.firstChild.scrollTop = place;
    if (focused) [...this.rows.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
  }

  async compare() {
    if (!this.runs.length) return;
    this.note.textContent = this.charts.childElementCount ? "" : "Reading the runs …";
    try {
      if (!this.names) {
        const newest = [...this.runs].sort((a, b) => b.changed - a.changed).find((run) => isNumber(run.figures.timesteps_total));
        const result = newest ? Object.keys((await get("curves", { run: newest.name })).columns) : [];
        this.names = [...new Set([RETURN, ...result])];
        this.metricBox.replaceChildren(...this.names.map((name) => el("option", { value: name }, name)));
      }
      this.found = list(await get("experiments", { metric: this.metric, by: byTime ? "seconds" : "steps" }));
    } catch (error) {
      this.note.textContent = error.message;
      return;
    }
    if (this.isClosed) return;
    this.note.textContent = this.found.length
      ? "Runs that differ only in their seed are one curve: the interquartile mean of their figures, with its 95 % interval."
      : "No run has a result with this figure yet.";
    this.showCurves();
  }

  showCurves() {
    clearCharts();
    this.panels = [];
    const envs = [...new Set(this.found.map((one) => one.env))];
    this.charts.replaceChildren(...envs.map((env) => this.panel(env)));
    this.panels.forEach((chart) => chart.draw());
  }

  panel(env) {
    const own = this.found.filter((one) => one.env === env).sort((a, b) => b.last - a.last);
    const drawn = () => own.filter((one, index) => (this.hidden.has(one.name) ? false : index < COLOURS || this.hidden.has(`+${one.name}`)));
    const chart = new Chart(`${this.metric} in ${env}`, () => aligned(own, drawn(), byTime), { height: 300, named: true });
    const legend = el("ul", { class: "legend" }, own.map((one, index) => {
      const isDrawn = drawn().includes(one);
      const box = el("input", { type: "checkbox", checked: isDrawn, onchange: () => {
        this.hidden.delete(one.name);
        this.hidden.delete(`+${one.name}`);
        this.hidden.add(box.checked ? `+${one.name}` : one.name);
        chart.draw();
      } });
      const seeds = one.runs.length > 1 ? `${one.runs.length} runs` : el("a", { href: runLink(one.runs[0]) }, one.runs[0]);
      return el("li", {}, el("label", {}, box, el("span", { class: `swatch c${index % COLOURS}`, "aria-hidden": "true" }), one.name), " ", seeds, el("b", {}, short(one.last)));
    }));
    this.panels.push(chart);
    return el("section", { class: "panel" }, chart.figure, legend);
  }
}

// Put curves with their own places on one axis, as a chart needs them.
function aligned(all, drawn, isTime) {
  const x = [...new Set(drawn.flatMap((one) => one.at))].sort((a, b) => a - b);
  const places = new Map(x.map((at, index) => [at, index]));
  const spread = (one, name) => {
    const values = Array(x.length).fill(null);
    one.at.forEach((at, index) => (values[places.get(at)] = one[name][index]));
    return values;
  };
  const filled = (one, name) => {  // bands need a value at each place between two of their own
    const values = spread(one, name);
    let last = -1;
    for (let index = 0; index < values.length; index++) {
      if (values[index] == null) continue;
      for (let gap = last + 1; last >= 0 && gap < index; gap++) {
        values[gap] = values[last] + ((values[index] - values[last]) * (x[gap] - x[last])) / (x[index] - x[last]);
      }
      last = index;
    }
    return values;
  };
  const lines = drawn.map((one) => ({
    label: one.name, colour: all.indexOf(one), values: filled(one, "mean"),
    ...(one.runs.length > 1 ? { low: filled(one, "low"), high: filled(one, "high") } : {}),
  }));
  return { x, isTime, lines };
}

// One run -----------------------------------------------------------------------------------------------------

class OneRun {
  constructor(name, section, file, found, curves, isSingle) {
    Object.assign(this, { name, section, file, columns: map(curves.columns), end: curves.end, charts: new Map(), picked: new Set() });
    this.head = el("div");
    this.body = el("div");
    const links = Object.entries(SECTIONS).map(([each, words]) =>
      el("a", { href: runLink(name, each), "aria-current": each === section ? "page" : null }, words));
    main.replaceChildren(
      el("p", { class: "crumbs" }, isSingle ? "" : el("a", { href: "#/" }, "All runs")),
      this.head, el("nav", { "aria-label": "Parts of this run" }, links), this.body,
    );
    this.draw = seldom(200, () => this.charts.forEach((chart) => chart.draw()));
    this.refreshLog = seldom(1000, () => this.showLog());
    this.update(found);
    ({ "": () => this.buildOverview(), workers: () => this.buildWorkers(), log: () => this.buildLog(), config: () => this.buildConfig() })[section]();
    this.source = follow({ run: name, from: this.end }, {
      run: (details) => this.update(details), results: (rows) => this.append(rows), reload: () => this.reload(),
    }, () => OVER.includes(this.glance.phase));
  }

  close() {
    this.source.close();
    this.draw.stop();
    this.refreshLog.stop();
  }

  async reload() {
    const curves = await get("curves", { run: this.name });
    this.columns = map(curves.columns);
    this.draw();
  }

  append(rows) {
    const size = list(this.columns[STEPS]).length;
    if (size > MAX_POINTS) {
      this.reload();
      return;
    }
    for (const row of rows) {
      const length = list(this.columns[STEPS]).length;
      if (length && row[STEPS] < this.columns[STEPS][length - 1]) continue;
      for (const name of Object.keys(row)) this.columns[name] ??= Array(length).fill(null);
      for (const [name, values] of Object.entries(this.columns)) values.push(isNumber(row[name]) ? row[name] : null);
    }
    this.draw();
    this.showFigures?.();
  }

  update(found) {
    this.found = found;
    this.account = map(found.account);
    this.glance = map(found.glance);
    document.title = `${this.name} · aiorl`;
    this.showHead();
    if (this.section === "" && this.lower) this.showLower();
    if (this.section === "workers" && this.workers) this.showWorkers();
    if (this.section === "log" && this.entries) this.refreshLog();
  }

  showHead() {
    const { glance } = this;
    const figures = map(glance.figures);
    const tile = (label, value, more) => el("div", { class: "tile" }, el("dt", {}, label), el("dd", {}, el("b", {}, value), more && el("small", {}, more)));
    const rate = (value) => (isNumber(value) ? `${short(value)}/s` : null);
    const range = isNumber(figures.episode_reward_min) ? `${short(figures.episode_reward_min)} to ${short(figures.episode_reward_max)}` : "no episode yet";
    const spread = isNumber(figures.std) ? `± ${short(figures.std)}, ` : "";
    const stops = Object.entries(map(glance.stops)).filter(([, goal]) => isNumber(goal)).map(([key, goal]) => {
      if (!(key in STOPS)) return el("li", {}, `${key}: ${short(goal)}`);
      const [name, figure, rate] = STOPS[key];
      const now = figures[figure] ?? list(this.columns[figure]).findLast(isNumber), speed = rate?.(figures);
      const form = key === "stop_time_s" ? span : short;
      const left = speed > 0 && goal > now && !OVER.includes(glance.phase) ? `, about ${span((goal - now) / speed)} left` : "";
      const words = rate ? `${name}: ${form(now)} of ${form(goal)}${left}` : `goal: ${name} ${form(goal)}, now ${form(now)}`;
      const bar = rate && isNumber(now) && el("progress", { max: "1", value: Math.min(1, now / goal), "aria-label": words });
      return el("li", {}, el("span", {}, words), bar);
    });
    const warnings = list(map(map(this.account.result).health).warnings).map((each) => el("li", {}, text(each)));
    this.head.replaceChildren(
      el("div", { class: "bar" }, el("h1", {}, this.name), badge(glance.phase)),
      el("p", { class: `phase ${glance.phase}` }, text(glance.words), el("span", { class: "soft" }, ` Last change ${ago(glance.changed)}.`)),
      warnings.length ? el("ul", { class: "warnings", "aria-label": "Warnings" }, warnings) : "",
      el("p", { class: "soft" }, [glance.algo, glance.env, isNumber(glance.seed) && `seed ${glance.seed}`].filter(Boolean).join(" · ")),
      el("dl", { class: "tiles" },
        tile("Return, last episodes", returnText(figures), spread + range),
        tile("Env steps sampled", short(figures.timesteps_total), rate(figures.sampled_steps_per_s)),
        tile("Env steps trained", short(figures.env_steps_trained_total), rate(figures.trained_steps_per_s)),
        tile("Updates", short(figures.updates_total), isNumber(figures.training_iteration) && `iteration ${count(figures.training_iteration)}`),
        tile("Training time", span(figures.time_total_s), isNumber(figures.episodes_total) && `${count(figures.episodes_total)} episodes`),
        tile("Workers", count(figures.num_healthy_workers), isNumber(figures.policy_lag) ? `lag ${short(figures.policy_lag)} versions` : null)),
      stops.length ? el("ul", { class: "stops", "aria-label": "Stop criteria" }, stops) : "",
    );
  }

  // Overview

  buildOverview() {
    clearCharts();
    this.grid = el("div", { class: "grid" });
    this.lower = el("div");
    this.figures = el("div", { class: "scroll figures", tabindex: "0", role: "region", "aria-label": "All figures" });
    const filter = el("input", { type: "search", placeholder: "for example loss", oninput: () => this.showFigures() });
    this.filter = filter;
    const all = el("details", { ontoggle: () => this.showFigures() }, el("summary", {}, "All figures: choose more curves"), el("label", {}, "Filter ", filter), this.figures);
    this.all = all;
    this.body.replaceChildren(el("div", { class: "bar" }, el("h2", {}, "Curves"), axisChoice(() => this.draw())), this.grid, all, this.lower);
    this.addCharts();
    this.showLower();
  }

  // The results by the axis chosen; both grow.
  axis() {
    return { x: list(this.columns[byTime ? SECONDS : STEPS]), isTime: byTime };
  }

  addChart(title, makeLines) {
    if (this.charts.has(title)) return;
    const chart = new Chart(title, () => ({ ...this.axis(), lines: makeLines() }));
    this.charts.set(title, chart);
    this.grid.append(chart.figure);
    chart.draw();
  }

  line(label, name, colour, low, high) {
    const none = () => Array(list(this.columns[STEPS]).length).fill(null);
    const column = (each) => this.columns[each] ?? none();
    return { label, colour, values: column(name), ...(this.columns[low] ? { low: column(low), high: column(high) } : {}) };
  }

  addCharts() {
    const has = (name) => list(this.columns[name]).some(isNumber);
    const goal = map(this.glance.stops).stop_return;
    if (!list(this.columns[STEPS]).length) {
      this.grid.append(el("p", { class: "empty" }, "There are no results yet. Curves appear with the first one."));
      this.isEmpty = true;
      return;
    }
    this.addChart("Return", () => [
      this.line("mean return", RETURN, 0, "episode_reward_min", "episode_reward_max"),
      ...(isNumber(goal) ? [{ label: "goal", colour: 1, dashed: true, values: list(this.columns[STEPS]).map(() => goal) }] : []),
    ]);
    if (has(EVALUATION)) {
      this.addChart("Evaluation", () => [this.line("mean return", EVALUATION, 4, "evaluation/episode_reward_min", "evaluation/episode_reward_max")]);
    }
    this.addChart("Env steps per second", () => [this.line("sampled", "sampled_steps_per_s", 0), this.line("trained", "trained_steps_per_s", 1)]);
    const losses = Object.keys(this.columns).filter((name) => name.startsWith("learner/") && LOSS.test(name) && !/coeff|target/.test(name) && has(name));
    for (const name of losses.slice(0, 8)) this.addChart(name, () => [this.line(name, name, 2)]);
    this.addChart("Policy lag", () => [this.line("mean lag", "policy_lag/mean", 6, "policy_lag/min", "policy_lag/max")]);
    for (const name of this.picked) this.addChart(name, () => [this.line(name, name, 3)]);
  }

  showFigures() {
    if (!this.all?.open) return;
    const words = this.filter.value.toLowerCase();
    const names = Object.keys(this.columns).filter((name) => name.toLowerCase().includes(words)).sort();
    if (this.figureNames?.join() !== names.join()) {
      this.figureNames = names;
      this.figures.replaceChildren(el("ul", {}, names.map((name) => {
        const box = el("input", { type: "checkbox", checked: this.charts.has(name), onchange: () => {
          if (box.checked) {
            this.picked.add(name);
            this.addChart(name, () => [this.line(name, name, 3)]);
          } else {
            this.picked.delete(name);
            this.charts.get(name)?.remove();
            this.charts.delete(name);
          }
        } });
        return el("li", {}, el("label", {}, box, name), el("output", {}));
      })));
    }
    this.figures.querySelectorAll("output").forEach((each, index) => {
      each.textContent = short(list(this.columns[names[index]]).findLast(isNumber));
    });
  }

  showLower() {
    if (this.isEmpty && list(this.columns[STEPS]).length) {
      this.isEmpty = false;
      this.grid.replaceChildren();
      this.addCharts();
    }
    const result = map(this.account.result);
    const parts = [this.health(result), this.ledger(map(result.ledger)), this.flow(result), this.evaluations(), this.films(), this.failures("h2")];
    const open = [...this.lower.querySelectorAll("details[open]")].map((each) => each.dataset.key);
    this.lower.replaceChildren(...parts.filter(Boolean));
    this.lower.querySelectorAll("details").forEach((each) => (each.open = open.includes(each.dataset.key)));
  }

  health(result) {
    const { account } = this, learner = map(account.learner);
    const numbers = { learner: map(result.learner), health: map(result.health) };
    const rows = [];
    const add = (words, value, shown, low, high, usual, advice) =>
      rows.push([words, shown, usual, value < low || value > high ? el("strong", { class: "unusual" }, advice) : "nothing"]);
    if (!OVER.includes(this.glance.phase) && isNumber(learner.no_update_s) && isNumber(account.time)) {
      const age = learner.no_update_s + Math.max(0, Date.now() / 1000 - account.time);
      add("Time since the last update", age, span(age), 0, 30, "below 30 s, or a few updates", "The log has a line with what the learner waits for.");
    }
    for (const [words, key, form, low, high, advice] of HEALTH) {
      const [part, name] = key.split("/");
      for (const [path, value] of Object.entries(numbers[part])) {
        if (!isNumber(value) || (path !== name && !path.endsWith(`/${name}`))) continue;
        const policy = path === name ? "" : `, ${path.slice(0, -name.length - 1)}`;
        const usual = high === Infinity ? `above ${form(low)}` : low === 0 && high < 1 ? `below ${form(high)}` : `${form(low)} to ${form(high)}`;
        add(words + policy, value, form(value), low, high, usual, advice);
      }
    }
    const skipped = result.updates_skipped;
    if (isNumber(skipped)) add("Updates skipped", skipped, count(skipped), 0, 0, "0", "Losses or gradients were not finite: lower lr, set grad_clip, look for values without bounds.");
    if (!rows.length) return null;
    return el("section", { class: "panel" }, el("h2", {}, "Health"),
      table("Health of the policies", ["Figure", "Now", "Usual", "What to do"], rows, { class: "cards health" }));
  }

  ledger(ledger) {
    if (!isNumber(ledger.sampled) || !ledger.sampled) return null;
    const reasons = (name, words) => Object.entries(map(ledger[name])).map(([reason, steps]) => [`${words}: ${reason}`, steps, name]);
    const parts = [["trained on", ledger.trained, "trained"], ["queued", ledger.queued, "queued"], ["in flight", ledger.in_flight, "flight"],
      ...reasons("discarded", "discarded"), ...reasons("lost", "lost")].filter(([, steps]) => isNumber(steps));
    const bar = el("div", { class: "ledger", "aria-hidden": "true" });
    for (const [, steps, kind] of parts) {
      if (steps <= 0) continue;
      const piece = el("span", { class: kind });
      piece.style.flexGrow = steps;
      bar.append(piece);
    }
    const rows = parts.map(([words, steps, kind]) =>
      el("li", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), `${words} `, el("b", {}, count(steps)), ` (${((100 * steps) / ledger.sampled).toFixed(1)} %)`));
    return el("section", { class: "panel" }, el("h2", {}, "Ledger of env steps"), el("p", { class: "soft" }, `${count(ledger.sampled)} env steps were sampled.`),
      bar, el("ul", { class: "legend" }, rows));
  }

  flow(result) {
    const transport = map(result.transport), learner = map(result.learner), ledger = map(result.ledger), perf = map(result.perf);
    const [wait, update, make] = [learner.wait_for_batch_s, learner.update_s, learner.make_batch_s].map((each) => (isNumber(each) ? each : 0));
    const share = wait + update + make > 0 ? wait / (wait + update + make) : null;
    const advice = list(this.account.advice).map((each) => el("p", {}, el("strong", {}, text(each))));
    const words = share == null ? null : `The learner spends ${(100 * share).toFixed(0)} % of its time waiting for batches, so ${share > 0.5 ? "sampling" : "training"} is the bottleneck.`;
    const facts = [
      ["leased: env steps in flight", count(ledger.in_flight)], ["queued: env steps", count(ledger.queued)], ["queued fragments", count(transport.queued_fragments)],
      ["queued messages to workers", count(transport.queued_messages_out)], ["received per second", isNumber(transport.bytes_in_per_s) ? `${short(transport.bytes_in_per_s)}B` : "–"],
      ["sent per second", isNumber(transport.bytes_out_per_s) ? `${short(transport.bytes_out_per_s)}B` : "–"], ["an update takes", isNumber(learner.update_s) ? `${short(learner.update_s * 1000)} ms` : "–"],
      ["waiting for a batch takes", isNumber(learner.wait_for_batch_s) ? `${short(learner.wait_for_batch_s * 1000)} ms` : "–"],
      ["processor of the host", isNumber(perf.cpu_util_percent) ? `${short(perf.cpu_util_percent)} %` : "–"], ["memory of the learner", isNumber(perf.learner_rss_bytes) ? `${short(perf.learner_rss_bytes)}B` : "–"],
    ].filter(([, value]) => value !== "–");
    if (!facts.length) return null;
    return el("section", { class: "panel" }, el("h2", {}, "Leases and queues"), words && el("p", {}, words), advice,
      el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  }

  evaluations() {
    const means = list(this.columns[EVALUATION]);
    const places = means.map((value, index) => (isNumber(value) ? index : -1)).filter((index) => index >= 0).slice(-20).reverse();
    if (!places.length) return null;
    const at = (name, index) => list(this.columns[name])[index];
    const rows = places.map((index) => [
      short(at("evaluation/env_steps_trained", index) ?? at(STEPS, index)), short(means[index]), short(at("evaluation/episode_reward_std", index)),
      short(at("evaluation/episode_reward_min", index)), short(at("evaluation/episode_reward_max", index)), short(at("evaluation/episodes_this_iter", index)),
    ]);
    return el("section", { class: "panel" }, el("h2", {}, "Evaluations"), table("Evaluations, newest first", ["After env steps", "Mean return", "Deviation", "Lowest", "Highest", "Episodes"], rows));
  }

  films() {
    const names = list(this.found.films);
    if (!names.length) return null;
    return el("section", { class: "panel" }, el("h2", {}, "Films"), el("div", { class: "grid" }, names.map((name) => {
      const src = `api/film?${new URLSearchParams({ run: this.name, name })}`;
      const film = name.endsWith(".gif") ? el("img", { src, alt: `Film ${name}` }) : el("video", { src, controls: true, preload: "metadata", "aria-label": `Film ${name}` });
      return el("figure", {}, film, el("figcaption", {}, name));
    })));
  }

  failures(heading) {
    const entries = list(this.found.failures);
    if (!entries.length) return null;
    return el("section", { class: "panel" }, el(heading, {}, "Failures"), el("ol", { class: "log" }, entries.slice().reverse().map(entryOf)));
  }

  // Workers

  buildWorkers() {
    this.workers = el("div");
    this.body.replaceChildren(this.workers);
    this.showWorkers();
  }

  showWorkers() {
    const { account } = this, learner = map(account.learner);
    const hosts = new Map();
    for (const worker of list(account.workers)) {
      const host = text(worker.host) || "an unknown host";
      hosts.set(host, [...(hosts.get(host) ?? []), map(worker)]);
    }
    const isOver = ["ended", "failed", "gone", "unknown"].includes(this.glance.phase);
    const parts = [...hosts].map(([host, workers]) => {
      const rate = workers.reduce((sum, worker) => sum + (isNumber(worker.env_steps_per_s) ? worker.env_steps_per_s : 0), 0);
      const rows = workers.map((worker) => [
        `worker ${text(worker.slot)}`, text(worker.state) || "–", isOver ? "–" : short(worker.env_steps_per_s), short(worker.env_step_ms), count(worker.env_steps), count(worker.lag),
        isNumber(worker.heard_s) && !isOver ? `${span(worker.heard_s)} ago` : "–", text(worker.pid), text(worker.words) || "–",
      ]);
      const whole = `${workers.length} ${workers.length === 1 ? "worker" : "workers"}${isOver ? " at the end" : `, ${short(rate)} env steps/s`}`;
      return el("section", { class: "panel" }, el("h2", {}, host, " ", el("small", { class: "soft" }, whole)),
        table(`Workers on ${host}`, ["Worker", "State", "Steps/s", "ms per step", "Env steps", "Lag", "Heard", "Process", "Last failure"], rows, { class: "cards" }));
    });
    if (!parts.length) parts.push(el("p", { class: "empty" }, isOver ? "The run left no account of workers." : "No worker is connected."));
    const gone = list(account.gone).map((each) => [`worker ${text(each.slot)}`, text(each.host), isNumber(each.time) ? ago(each.time) : "–", count(each.env_steps), text(each.words)]);
    if (gone.length) {
      parts.push(el("section", { class: "panel" }, el("h2", {}, "Gone ", el("small", { class: "soft" }, `${count(account.num_gone)} in all`)),
        table("Workers that are gone", ["Worker", "Host", "When", "Env steps", "Last words"], gone, { class: "cards" })));
    }
    const words = Object.entries(map(account.logs)).filter(([, last]) => text(last)).map(([name, last]) => [el("a", { href: runLink(this.name, "log", `logs/${name}`) }, name), last]);
    if (words.length) parts.push(el("section", { class: "panel" }, el("h2", {}, "Last words"), table("Last lines of the workers' logs", ["Log", "Last line"], words)));
    const facts = text(learner.host) && el("p", { class: "soft" }, `Learner: ${learner.host}, process ${text(learner.pid)}${list(learner.addresses).length ? `, at ${learner.addresses.slice(0, 4).map(text).join(", ")}` : ""}`);
    const open = [...this.workers.querySelectorAll("details[open]")].map((each) => each.dataset.key);
    const advice = list(account.advice).map((each) => el("p", {}, el("strong", {}, text(each))));
    this.workers.replaceChildren(...[facts, ...advice, ...parts, this.failures("h2")].filter(Boolean));
    this.workers.querySelectorAll("details").forEach((each) => (each.open = open.includes(each.dataset.key)));
  }

  // Log

  buildLog() {
    const words = el("input", { type: "search", placeholder: "text", oninput: () => this.refreshLog() });
    const names = Object.fromEntries(["log.txt", ...Object.keys(map(this.account.logs)).map((name) => `logs/${name}`)].map((name) => [name, name]));
    const file = this.file in names ? this.file : "log.txt";
    this.query = { file, level: "DEBUG", words };
    this.entries = el("ol", { class: "log", "aria-label": "Entries, oldest first" });
    this.cut = el("p", { class: "soft", role: "status" });
    const change = (name) => (value) => {
      this.query[name] = value;
      this.showLog(true);
    };
    this.body.replaceChildren(
      el("div", { class: "bar" }, choice("Log", names, file, change("file")),
        choice("From", { DEBUG: "all", INFO: "info", WARNING: "warnings", ERROR: "errors" }, "DEBUG", change("level")), el("label", {}, "Search ", words)),
      this.cut, el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Log" }, this.entries));
    this.showLog(true);
  }

  async showLog(toEnd = false) {
    const box = this.entries.parentElement;
    const isAtEnd = toEnd || box.scrollHeight - box.scrollTop - box.clientHeight < 30;
    try {
      const found = await get("log", { run: this.name, file: this.query.file, level: this.query.level, words: this.query.words.value });
      const entries = list(found.entries);
      const said = JSON.stringify(entries);
      this.cut.textContent = entries.length ? (found.is_cut ? `The newest ${entries.length} entries.` : `${entries.length} entries.`) : "No entry.";
      if (said === this.said) return;
      this.said = said;
      this.entries.replaceChildren(...entries.map(entryOf));
      if (isAtEnd) box.scrollTop = box.scrollHeight;
    } catch (error) {
      this.cut.textContent = error.message;
    }
  }

  // Config

  async buildConfig() {
    const filter = el("input", { type: "search", placeholder: "key, value or origin", oninput: () => show() });
    const only = el("input", { type: "checkbox", onchange: () => show() });
    const box = el("div");
    this.body.replaceChildren(el("div", { class: "bar" }, el("label", {}, "Filter ", filter), el("label", {}, only, " only what is not a default")), box);
    let rows = [];
    const show = () => {
      const words = filter.value.toLowerCase();
      const shown = rows.filter((row) => row.join(" ").toLowerCase().includes(words) && !(only.checked && row[2] === "default"));
      box.replaceChildren(shown.length ? table(`${shown.length} settings`, ["Key", "Value", "From"], shown, { class: "config" }) : el("p", { class: "empty" }, "No setting."));
    };
    try {
      const found = await get("config", { run: this.name });
      rows = settings(map(found.values), map(found.origins));
      show();
    } catch (error) {
      box.textContent = error.message;
    }
  }
}

// Rows of key, value and origin; a group's origin is that of its keys.
function settings(values, origins, prefix = "", above = Object.keys(origins).length ? "default" : "–") {
  return Object.entries(values).flatMap(([name, value]) => {
    const key = prefix + name, origin = text(origins[key]) || above;
    if (Object.keys(map(value)).length) return settings(value, origins, `${key}.`, origin);
    return [[key, typeof value === "string" ? value : JSON.stringify(value), origin]];
  });
}

function entryOf(entry) {
  const more = text(entry.more);
  const key = `${entry.time} ${text(entry.text).slice(0, 200)}`;
  return el("li", { class: text(entry.level).toLowerCase() }, el("time", {}, text(entry.time)), " ", el("span", { class: "level" }, text(entry.level).toLowerCase()), " ",
    more ? el("details", { "data-key": key }, el("summary", {}, text(entry.text)), el("pre", {}, more)) : el("span", {}, text(entry.text)));
}

// Addresses: #/ and #/run/NAME/SECTION ------------------------------------------------------------------------

async function show() {
  view.close();
  clearCharts();
  say("Loading");
  const [, kind, name, section = "", file = ""] = location.hash.split("/");
  const address = location.hash;
  try {
    const all = await get("runs");
    document.getElementById("where").textContent = text(all.root);
    const own = kind === "run" ? decodeURIComponent(name) : all.is_single && all.runs.length ? all.runs[0].name : null;
    document.title = own ?? "aiorl";
    if (own == null) {
      if (address === location.hash) view = new AllRuns(all);
    } else {
      const [found, curves] = await Promise.all([get("run", { run: own }), get("curves", { run: own })]);
      if (address === location.hash) view = new OneRun(own, section in SECTIONS ? section : "", decodeURIComponent(file), found, curves, all.is_single);
    }
  } catch (error) {
    view = { close() {} };
    main.replaceChildren(el("p", { class: "empty" }, error.message), el("p", {}, el("a", { href: "#/" }, "All runs")));
    say("Not shown", true);
  }
}

addEventListener("hashchange", () => {
  const before = document.activeElement;
  if (location.hash !== "#main") show().then(() => {
    // the user may have moved on while the part was loading
    if ([before, document.body].includes(document.activeElement)) main.focus({ preventScroll: true });
  });
});
show();
