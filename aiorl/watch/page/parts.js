// Elements, texts for numbers, and charts. Text from a run only ever becomes text: nothing here parses markup.

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null && child !== false));
  return made;
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const text = (value) => (typeof value === "string" ? value : isNumber(value) ? String(value) : "");
export const list = (value) => (Array.isArray(value) ? value : []);
export const map = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});

export function count(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en") : "–";
}

export function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, name] of [[1e9, " G"], [1e6, " M"], [1e4, " k"]]) {
    if (size >= unit) {
      const scaled = value / (unit === 1e4 ? 1e3 : unit);
      return scaled.toLocaleString("en", { maximumSignificantDigits: 3 }) + name;
    }
  }
  if (size >= 100 && Number.isInteger(value)) return value.toLocaleString("en");
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 4 : 3 });
}

export const percent = (share) => (isNumber(share) ? `${short(100 * share)} %` : "–");

export function span(seconds) {
  if (!isNumber(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.round(whole / 60)} min`;
  if (whole < 172800) return `${(whole / 3600).toFixed(1)} h`;
  return `${(whole / 86400).toFixed(1)} days`;
}

export const ago = (time) => `${span(Date.now() / 1000 - time)} ago`;

// Charts ------------------------------------------------------------------------------------------------------

const shown = new Set();
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const COLOURS = 8;

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = [...shown].find((each) => each.host === target);
    if (chart && chart.plot) chart.plot.setSize({ width: target.clientWidth, height: chart.height });
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown.forEach((chart) => chart.draw(true)));

export function clearCharts() {
  for (const chart of shown) chart.remove();
}

// A chart with a caption. `lines()` returns {x, isTime, lines: [{label, values, low, high, colour, dashed}]}.
export class Chart {
  constructor(title, lines, { height = 190, named = false } = {}) {
    Object.assign(this, { lines, height, title, named });
    this.readout = el("span", { class: "readout" });
    this.host = el("div", { class: "plot" });
    this.figure = el("figure", {}, el("figcaption", {}, el("strong", {}, title), this.readout), this.host);
    shown.add(this);
    sizes.observe(this.host);
  }

  remove() {
    shown.delete(this);
    sizes.unobserve(this.host);
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.figure.remove();
  }

  draw(anew = false) {
    if (!this.host.isConnected || !this.host.clientWidth) return;
    const { x, isTime, lines } = this.lines();
    const data = [x];
    const series = [{}];
    const bands = [];
    this.told = [];
    for (const line of lines) {
      const stroke = colour(`--c${line.colour % COLOURS}`);
      if (line.low) {
        bands.push({ series: [data.length, data.length + 1], fill: `${stroke}2e` });
        data.push(line.high, line.low);
        series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
      }
      const few = line.values.filter(isNumber).length < 40;
      this.told.push([line, data.length]);
      data.push(line.values);
      series.push({
        stroke, width: line.dashed ? 1.2 : 1.8, spanGaps: true, dash: line.dashed ? [5, 4] : [],
        points: { show: few && !line.dashed, size: 5, fill: stroke },
      });
    }
    const shape = `${series.length} ${bands.length} ${isTime} ${lines.map((line) => line.label + line.colour)}`;
    this.isTime = isTime;
    if (this.plot && !anew && shape === this.shape) this.plot.setData(data);
    else this.make(data, series, bands, isTime);
    this.shape = shape;
    this.say(null);
    this.host.setAttribute("role", "img");
    this.host.setAttribute("aria-label", this.summary());
  }

  make(data, series, bands, isTime) {
    if (this.plot) this.plot.destroy();
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const options = {
      width: this.host.clientWidth, height: this.height, series, bands, legend: { show: false },
      // without a range of its own, a curve of zeros has an axis to 100
      scales: { x: { time: false }, y: { range: (_, low, high) => (low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true)) } },
      axes: [
        { ...axis, values: (_, marks) => marks.map((mark) => (isTime ? span(mark) : short(mark))), space: 70, size: 28 },
        { ...axis, values: (_, marks) => marks.map(short), size: 56, space: 34 },
      ],
      cursor: { y: false, points: { size: 6 } },
      hooks: { setCursor: [(plot) => this.say(plot.cursor.idx)] },
    };
    this.plot = new uPlot(options, data, this.host);
  }

  // Show the values at a place in the caption, or the newest ones.
  say(place) {
    if (!this.plot || !this.told) return;
    const data = this.plot.data;
    const words = [];
    for (const [line, at] of this.told) {
      if (line.dashed || (this.named && place == null)) continue;
      const index = place ?? data[at].findLastIndex(isNumber);
      if (!isNumber(data[at][index])) continue;
      const range = line.low && isNumber(line.low[index]) ? ` (${short(line.low[index])} to ${short(line.high[index])})` : "";
      words.push(`${this.told.length > 1 ? `${line.label} ` : ""}${short(data[at][index])}${range}`);
    }
    const at = place != null && isNumber(data[0][place]) ? `at ${this.isTime ? span(data[0][place]) : short(data[0][place])}: ` : "";
    this.readout.textContent = at + words.slice(0, 6).join(", ");
  }

  summary() {
    const parts = this.told.filter(([line]) => !line.dashed).slice(0, 12).map(([line]) => {
      const values = line.values.filter(isNumber);
      if (!values.length) return `${line.label}: no values yet`;
      const ends = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
      return `${line.label}: from ${short(values[0])} to ${short(values.at(-1))}, between ${short(ends[0])} and ${short(ends[1])}`;
    });
    return `Curve of ${this.title} over ${this.isTime ? "training time" : "env steps"}. ${parts.join(". ")}.`;
  }
}

// Tables ------------------------------------------------------------------------------------------------------

// A table whose cells know the names of their columns, which narrow screens show in front of them.
export function table(caption, columns, rows, extra = {}) {
  const head = el("tr", {}, columns.map((name) => (name instanceof Node ? name : el("th", { scope: "col" }, name))));
  const label = (index) => (columns[index] instanceof Node ? columns[index].textContent : columns[index]);
  const body = rows.map((cells) =>
    el("tr", {}, cells.map((cell, index) => {
      const isFirst = index === 0;
      return el(isFirst ? "th" : "td", { scope: isFirst ? "row" : null, "data-label": label(index) }, cell);
    })),
  );
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, el("table", extra,
    el("caption", { class: "hidden" }, caption), el("thead", {}, head), el("tbody", {}, body)));
}
