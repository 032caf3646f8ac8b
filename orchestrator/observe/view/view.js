"use strict";
// Draws what the stream says. Every event is the whole picture, so one that was missed does not matter.

function card(label, value, detail, style) {
  return html("div", { class: `card ${style || ""}` }, html("div", { class: "card-label" }, label),
    html("div", { class: "card-value" }, value), html("div", { class: "card-detail" }, detail || " "));
}

function header(now) {
  const run = now.run;
  document.title = `${run.name} · step ${now.step} · rl-coserve`;
  put("name", run.name);
  put("kind", run.kind);
  document.getElementById("kind").className = `badge ${run.kind}`;
  const status = now.reading !== undefined ? "reading the log" : run.status === "unfinished" ? "running" : run.status;
  const parts = [html("span", { class: `status-${run.status === "unfinished" ? "completed" : run.status}`, id: "status" }, status)];
  if (run.mode) parts.push(html("span", {}, `${run.mode}, α = ${run.alpha}`));
  if (run.resumed_from !== null) parts.push(html("span", {}, `resumed from step ${run.resumed_from}${run.rolled_back ? `, ${run.rolled_back} rolled back` : ""}`));
  if (run.started) parts.push(html("span", {}, `started ${run.started.replace("T", " ").replace("+00:00", " UTC")}`));
  put("meta", ...parts);
}

function notice(now) {
  const place = document.getElementById("notice");
  const say = (style, strong, text) => {
    place.hidden = false;
    place.className = `notice ${style}`;
    place.replaceChildren(html("strong", {}, strong), ` ${text}`);
  };
  const run = now.run;
  if (now.reading !== undefined) say("", `Reading the log, ${now.reading} %.`, "The figures are of what has been read.");
  else if (run.status === "failed") say("bad", "The run failed.", run.reason);
  else if (run.status === "interrupted") say("", "The run was interrupted.", run.reason === "interrupted" ? "" : run.reason);
  else if (run.status === "completed") say("good", "The run is complete.", "This is its last state.");
  else if (now.silent) say("bad", `No sign of life for ${count(now.silent)} s.`, "It may be stopped, or gone.");
  else place.hidden = true;
  waiting(run.status === "unfinished" && !now.silent ? now.waiting_for || now.open.join(", ") : "");
}

const HELD = 3000;  // milliseconds that a text stays, for it to be read
let heldUntil = 0;
function waiting(text) {
  const place = document.getElementById("waiting");
  const same = place.dataset.text === text;
  if (same || (text && place.dataset.text && Date.now() < heldUntil)) return;
  place.dataset.text = text;
  heldUntil = Date.now() + HELD;
  place.replaceChildren(...(text ? [`Waiting for: ${text}`] : []));
}

function cards(now) {
  const [reward, success] = ["reward", "success"].map((name) => now.curves.find((curve) => curve.name === name).points.slice(-1)[0]);
  const started = now.ledger.started, summed = now.ends.reduce((sum, [, , number]) => sum + number, 0);
  put("cards",
    card("Reward", reward ? brief(reward[1]) : "–", "mean of the last batch"),
    card("Success", success ? percent(success[1]) : "–", success ? `${percent(success[2])} to ${percent(success[3])}, step ${success[0]}` : "not evaluated yet"),
    card("Step", html("span", {}, count(now.step), html("small", {}, ` of ${count(now.run.steps)}`)), `${clock(now.t)} since the start`),
    card("Speed", html("span", {}, now.tokens_per_s === null ? "–" : count(now.tokens_per_s), html("small", {}, " tokens/s")), `the last 5 steps; version ${now.version}`),
    card("Ledger", started === summed ? "closes ✓" : `off by ${count(started - summed)}`, `${count(started)} trajectories`, started === summed ? "" : "bad"));
}

function kv(row) {
  if (!row.kv_capacity) return "–";
  const share = row.kv_used / row.kv_capacity, shown = row.kv_mean === undefined ? share : row.kv_mean;
  const bar = svg("svg", { class: `kv${shown > 0.95 ? " full" : ""}`, viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { x: 0, y: 0, height: 10, width: 100 * shown }));
  return html("span", {}, bar, percent(share) + (row.kv_mean === undefined ? "" : ` · ${percent(row.kv_mean)}`));
}

const running = (row) => whole(row.running) + (row.running_mean === undefined ? "" : ` · ${brief(row.running_mean)}`);
const slack = (seconds) => (seconds === undefined ? "–"
  : html("span", seconds < 0 ? { class: "late" } : {}, `${brief(seconds)} s`));
const late = (number, all, blamed) => (all === undefined ? "–" : `${count(number)} of ${count(all)} · ${count(blamed)}`);

// Workers that have their device together with a serving engine, which is as it said last.
function beside(now) {
  const rows = now.workers.filter((row) => row.budget !== undefined);
  document.getElementById("beside-figure").hidden = !rows.length;
  put("beside", table("Beside serving",
    ["Worker", "Lent pages", "MiB", "TTFT slack", "TPOT slack", "Arrival slack", "TTFT misses · by rollouts", "TPOT misses · by rollouts"],
    rows.map((row) => [row.name, `${count(row.pages)} of ${count(row.budget)}`, brief((row.pages * row.page_bytes) / (1 << 20)), slack(row.ttft_slack),
      slack(row.tpot_slack), slack(row.arriving), late(row.late_first, row.firsts, row.blamed_first), late(row.late_next, row.nexts, row.blamed_next)]),
    [1, 2, 3, 4, 5, 6, 7]));
}

function underWay(now) {
  put("under-way", now.run.status === "unfinished" ? "What is under way" : "What was under way at the end");
  put("timeline", timeline(now.timeline, document.getElementById("timeline-legend")));
  const reasons = Object.entries(now.reasons);
  const none = now.run.status === "unfinished" ? "None is in flight." : "The run has ended.";
  put("reasons", reasons.length ? bars(reasons, "c1") : empty(none));
  const lent = now.workers.some((row) => row.handed_back !== undefined);  // by servers of serving GPUs
  document.getElementById("workers-title").textContent = now.workers_up < now.workers_known
    ? `Workers (${count(now.workers_up)} of ${count(now.workers_known)} up)` : "Workers";
  put("workers", now.workers.length
    ? table("Workers", ["Worker", "State", "KV now · mean", "Requests", "Running now · mean", "Waiting", "Version", "Tokens/s", ...(lent ? ["Handed back"] : [])],
      now.workers.map((row) => [row.name, row.state || "–", kv(row), whole(row.requests), running(row), whole(row.waiting), whole(row.version),
        row.tokens_per_s === undefined ? "–" : count(row.tokens_per_s), ...(lent ? [whole(row.handed_back)] : [])]), [3, 4, 5, 6, 7, 8])
    : empty("None has said how it is."));
  beside(now);
  const rows = now.trajectories;
  document.getElementById("trajectories-title").textContent =
    `The oldest trajectories (${count(rows.length)} of ${count(now.in_flight)} in flight, ${count(now.buffered)} scored and buffered, ${count(now.queue)} turns queued)`;
  put("trajectories", rows.length
    ? table("The oldest trajectories", ["Trajectory", "Task", "Waits for", "Worker", "Turns", "Age"],
      rows.map((row) => [row.id, row.task, row.waits, row.worker || "–", count(row.turns), `${brief(row.age)} s`]), [4, 5])
    : empty(none));
}
const whole = (value) => (value === undefined || value === null ? "–" : count(value));

function learning(now) {
  put("curves", ...now.curves.map(({ name, title, label, points }) => {
    const share = label.endsWith("(%)"), words = share ? (value) => `${Math.round(100 * value)} %` : brief;
    const drawing = curve(points, `${title} by training step`, words, share ? [0, 1] : undefined);
    return html("figure", {}, html("figcaption", {}, html("h3", {}, title)), html("div", { id: name }, drawing));
  }));
  put("learning", now.learning.length
    ? table("The trainer's last step", ["What", "Value"], now.learning.map(([what, , value]) => [what, value === null ? "–" : brief(value)]), [1])
    : empty("No step was trained yet."));
}

const incident = { recovered: "incident-good", borrowed: "incident-good", returned: "incident-warn" };

function accounts(now) {
  put("ledger", bars(now.ends.filter(([, , number]) => number).map(([words, colour, number]) => [words, number, colour]), "c0"));
  const lags = Object.entries(now.lag).map(([lag, number]) => [lag === "1" ? "1 version" : `${lag} versions`, number]);
  put("lag", lags.length ? bars(lags, "c2") : empty("No batch was taken yet."));
  put("incidents", now.incidents.length
    ? table("What went wrong", ["When", "Kind", "What", "Detail"], now.incidents.map((row) => [clock(row.t), html("span", { class: incident[row.kind] || "incident-bad" }, row.kind), row.what, row.detail]), [])
    : empty("Nothing."));
}

function draw(now) {
  header(now);
  notice(now);
  cards(now);
  underWay(now);
  learning(now);
  accounts(now);
  document.body.dataset.drawn = String(now.step);
}

document.getElementById("all-runs").hidden = !/\/run\/[^/]+\/$/.test(location.pathname);
let over = false;
follow((now) => {
  over = now.run.status !== "unfinished";
  draw(now);
}, () => (over ? ["The run has ended, and its server with it; rl-coserve view shows it again.", ""]
  : ["The server does not answer; trying again.", "lost"]));
