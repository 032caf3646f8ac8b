"use strict";
// Elements and charts. Text from the run only ever becomes text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

function make(space, tag, attributes, children) {
  const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  for (const child of children || []) {
    if (child !== null && child !== undefined) element.append(child); // a string becomes a text node
  }
  return element;
}
const html = (tag, attributes, ...children) => make(null, tag, attributes, children);
const svg = (tag, attributes, ...children) => make(SVG, tag, attributes, children);
// A table that is drawn again stays where it was scrolled to, and who is in it with the keyboard stays there.
function put(id, ...children) {
  const place = document.getElementById(id), before = place.querySelector(".scroll");
  const [from, inside] = before ? [before.scrollLeft, before === document.activeElement] : [0, false];
  place.replaceChildren(...children);
  const now = place.querySelector(".scroll");
  if (now && from) now.scrollLeft = from;
  if (now && inside) now.focus({ preventScroll: true });
}
const empty = (text) => html("p", { class: "empty" }, text);

const count = (value) => Math.round(value).toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
function brief(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return count(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 1 || value === 0 ? value.toFixed(2) : value.toPrecision(2);
}
function clock(seconds) {
  const total = Math.floor(seconds), pad = (n) => String(n).padStart(2, "0");
  const minutes = Math.floor(total / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours}:${pad(minutes % 60)}:${pad(total % 60)}` : `${minutes}:${pad(total % 60)}`;
}

// rows: [words, value]; colour: class of the bar. Lengths are shares of the largest.
function bars(rows, colour) {
  const most = Math.max(1, ...rows.map((row) => row[1]));
  return html("div", { class: "bars" }, ...rows.map(([words, value, own]) => html("div", {},
    html("span", {}, words),
    svg("svg", { class: own || colour, viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { x: 0, y: 0, height: 10, width: value ? Math.max(0.6, (100 * value) / most) : 0 })),
    html("span", {}, count(value)))));
}

function table(name, head, rows, numbers) {
  const side = (place) => (numbers.includes(place) ? { class: "number" } : {});
  return html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, html("table", { class: "tight" },
    html("thead", {}, html("tr", {}, ...head.map((title, place) => html("th", side(place), title)))),
    html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((cell, place) => html("td", { ...side(place), "data-label": head[place] }, cell)))))));
}

function niceStep(span, wanted) {
  const raw = span / wanted, base = 10 ** Math.floor(Math.log10(raw));
  return base * [1, 2, 5, 10].find((factor) => factor * base >= raw - 1e-12);
}
function ticks(low, high, wanted) {
  const step = niceStep(high - low || 1, wanted), found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

// points: [step, value, low?, high?]; a missing value is a gap.
function curve(points, title, words, fixed) {
  const known = points.filter((point) => point[1] !== null);
  if (!known.length) return empty("Nothing yet.");
  const wide = 460, high = 190, left = 40, right = 14, top = 10, bottom = 26;
  const values = known.flatMap((point) => point.slice(1).filter((value) => value !== null));
  const floor = fixed ? fixed[0] : Math.min(0, ...values), roof = fixed ? fixed[1] : Math.max(floor + 1e-6, ...values);
  const first = known[0][0], last = Math.max(first + 1, known[known.length - 1][0]);
  const x = (step) => left + ((step - first) / (last - first)) * (wide - left - right);
  const y = (value) => top + (1 - (value - floor) / (roof - floor)) * (high - top - bottom);
  const chart = svg("svg", { class: "plot", viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": title });
  for (const at of ticks(floor, roof, 4)) {
    chart.append(svg("line", { class: "grid", x1: left, x2: wide - right, y1: y(at), y2: y(at) }),
      svg("text", { class: "tick end", x: left - 6, y: y(at) + 4 }, words(at)));
  }
  for (const at of ticks(first, last, 5)) {
    if (Number.isInteger(at)) chart.append(svg("text", { class: "tick middle", x: x(at), y: high - 8 }, count(at)));
  }
  const whole = known.filter((point) => point.length > 3 && point[2] !== null && point[3] !== null);
  if (whole.length) {
    const upper = whole.map((point) => `${x(point[0])},${y(point[3])}`);
    const lower = whole.map((point) => `${x(point[0])},${y(point[2])}`).reverse();
    chart.append(svg("polygon", { class: "band c1", points: [...upper, ...lower].join(" ") }));
  }
  chart.append(svg("polyline", { class: "line medium c1", points: known.map((point) => `${x(point[0])},${y(point[1])}`).join(" ") }));
  const end = known[known.length - 1];
  chart.append(svg("circle", { class: "dot c1", cx: x(end[0]), cy: y(end[1]), r: 4 }));
  return chart;
}

const LANES = [["rollout", "Rollout"], ["trainer", "Trainer"], ["weights", "Weights"]];

// data.states: state -> [words, colour, waits].
function timeline(data, legend) {
  const narrow = window.matchMedia("(max-width: 760px)").matches;
  const wide = narrow ? 520 : 980, left = 78, right = 10, top = 24, row = 34, high = top + LANES.length * row + 30;
  const span = Math.max(1e-6, data.end - data.begin);
  const x = (t) => left + ((t - data.begin) / span) * (wide - left - right);
  const chart = svg("svg", { class: "plot", viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "Stages of the last steps" });
  for (const at of ticks(0, span, narrow ? 4 : 8)) {
    chart.append(svg("text", { class: "tick middle", x: x(data.begin + at), y: high - 8 }, `${brief(at)} s`));
  }
  for (const [number, t] of data.steps) {
    chart.append(svg("line", { class: "boundary", x1: x(t), x2: x(t), y1: 14, y2: high - 26 }),
      svg("text", { class: "note end", x: x(t) - 5, y: 14 }, narrow ? `${number}` : `step ${number}`));
  }
  const shown = new Set();
  LANES.forEach(([lane, name], place) => {
    const y = top + place * row;
    chart.append(svg("text", { class: "lane", x: 0, y: y + 17 }, name));
    for (const [state, start, end, note] of data.lanes[lane] || []) {
      const [words, colour, waits] = data.states[state];
      shown.add(state);
      const piece = svg("rect", {
        class: `piece ${colour}${waits ? " waiting" : ""}`, x: x(start), y, height: row - 12, rx: 2,
        width: Math.max(0.6, x(end) - x(start)),
      });
      piece.append(svg("title", {}, `${name}: ${words}, ${brief(end - start)} s${note ? ` (${note})` : ""}`));
      chart.append(piece);
    }
  });
  legend.replaceChildren(...Object.keys(data.states).filter((state) => shown.has(state)).map((state) => {
    const [words, colour, waits] = data.states[state];
    return html("li", {}, html("span", { class: `chip ${colour}${waits ? " hatched" : ""}` }), words);
  }));
  return shown.size ? chart : empty("The first batch is not complete yet.");
}

const AGAIN = 5000;  // milliseconds until a stream that the server refused is asked for again: a browser would never
// Gives every picture of the server to `draw`, and says beside it how things stand. `lost`: [text, class] while nobody answers.
function follow(draw, lost) {
  const place = document.getElementById("connection");
  const say = (text, style) => { place.textContent = text; place.className = style; };
  const stream = new EventSource("stream");
  stream.onmessage = (event) => {
    draw(JSON.parse(event.data));
    say("Connected.", "");
  };
  stream.onerror = async () => {
    if (stream.readyState !== EventSource.CLOSED) return say(...lost());
    setTimeout(() => follow(draw, lost), AGAIN);
    try {
      const answer = await fetch("state.json");
      if (answer.status === 401) return say("The server wants another token: open the address that it printed.", "lost");
      if (!answer.ok) return say(...lost());
      draw(await answer.json());
      say(`So many pages look at this that here it is updated every ${AGAIN / 1000} seconds only.`, "");
    } catch {
      say(...lost());
    }
  };
}
