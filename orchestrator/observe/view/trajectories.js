"use strict";
// The trajectories of a run: a list, and one of them turn by turn. What stands behind # is what is shown, so that it can be sent on.

const form = document.getElementById("choice");
const seconds = (value) => (value < 1 ? `${brief(1000 * value)} ms` : `${brief(value)} s`);
const reward = (value) => (value === null ? "–" : brief(value));
const ended = (outcome) => html("span", { class: outcome === "trained" ? "ok" : outcome.startsWith("failed") ? "broken" : "" }, outcome);

async function ask(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer.json();
}

function link(identity, words) {
  const place = new URLSearchParams(location.hash.slice(1));
  place.set("id", identity);
  return html("a", { href: `#${place}` }, words || identity);
}

function drawLines(now, place) {
  const last = now.first + now.trajectories.length;
  put("title", now.total ? `${count(now.first + 1)} to ${count(last)} of ${count(now.total)} trajectories` : "No trajectory");
  put("lines", now.trajectories.length ? table("Trajectories", ["Trajectory", "Task", "Step", "Reward", "Turns", "Tokens said", "Time", "End"],
    now.trajectories.map((line) => [link(line.trajectory_id), line.task, count(line.step), reward(line.total_reward),
      count(line.total_steps), count(line.generated_tokens), seconds(line.wall_time), ended(line.outcome)]), [2, 3, 4, 5, 6])
    : empty("Nothing is stored that fits; a run stores what has ended."));
  const page = (first, words) => {
    const to = new URLSearchParams(place);
    to.set("first", first);
    to.delete("id");
    return html("a", { href: `#${to}` }, words);
  };
  const turns = [];
  if (now.first) turns.push(page(Math.max(0, now.first - now.most), "Previous"), " ");
  if (last < now.total) turns.push(page(last, "Next"));
  put("pages", ...turns);
}

const SAID = ["c1", "c2", "c3", "c4", "c6", "c7"]; // of versions, in turn; c5 is too light for text
function spoken(turn, colours) {
  return turn.action.map((span) => html("span", { class: `said ${colours.get(span.version)}`,
    title: `version ${span.version}, ${count(span.tokens)} tokens${span.logprob === null ? "" : `, mean log-prob ${brief(span.logprob)}`}` }, span.text));
}

function drawOne(shown) {
  const line = shown.line, versions = [...new Set(shown.turns.flatMap((turn) => turn.action.map((span) => span.version)))].sort((a, b) => a - b);
  const colours = new Map(versions.map((version, place) => [version, SAID[place % SAID.length]]));
  const facts = [line.task, `step ${count(line.step)}`, `reward ${reward(line.total_reward)}`,
    ...Object.entries(shown.metrics).map(([name, value]) => `${name} ${brief(value)}`),
    `${count(line.generated_tokens)} of ${count(line.total_tokens)} tokens said`, seconds(line.wall_time)];
  if (line.truncated) facts.push("truncated");
  if (shown.gap !== null) facts.push(`log-prob gap of the batch ${brief(shown.gap)}`);
  const parts = [html("h2", {}, `${line.trajectory_id} `, ended(line.outcome)), html("p", { class: "lead" }, facts.join(", ")),
    html("p", { class: "lead" }, `Prompt: ${shown.prompt || "–"} (seed ${shown.seed})`)];
  if (shown.missing) parts.push(html("p", { class: "notice" }, `Token ids are shown: ${shown.missing}.`));
  for (const error of shown.errors) parts.push(html("p", { class: "notice bad" }, error));
  if (shown.group.length > 1) {
    parts.push(html("p", { class: "lead" }, `Its group of ${shown.group.length}, best first: `,
      ...shown.group.slice(0, 64).flatMap((one) => [one.trajectory_id === line.trajectory_id
        ? html("strong", {}, `${one.trajectory_id} ${reward(one.total_reward)}`)
        : link(one.trajectory_id, `${one.trajectory_id} ${reward(one.total_reward)}`), "  "])));
  }
  parts.push(html("ul", { class: "legend" }, ...versions.map((version) =>
    html("li", {}, html("span", { class: `chip ${colours.get(version)}`, "aria-hidden": "true" }), `version ${version}`))));
  shown.turns.forEach((turn, place) => {
    const waited = turn.waited === null ? "" : `, waited ${seconds(turn.waited)}, ${turn.worker}`;
    parts.push(html("figure", { class: "turn" }, html("figcaption", {}, html("h3", {}, `Turn ${place + 1}`),
      html("span", { class: "under" }, `answer ${seconds(turn.generated)}, environment ${seconds(turn.environment)}${waited}`
        + (turn.reward ? `, reward ${brief(turn.reward)}` : ""))),
    turn.context ? html("p", { class: "under" }, `A new context, ${turn.context}`) : null,
    turn.observed_tokens ? html("pre", { class: "seen" }, turn.observation) : null, html("pre", {}, ...spoken(turn, colours))));
  });
  const place = document.getElementById("one");
  place.hidden = false;
  place.replaceChildren(...parts);
  place.scrollIntoView();
}

let drawn = null; // the list that is there
async function show() {
  const place = new URLSearchParams(location.hash.slice(1)), identity = place.get("id");
  for (const field of form.elements) if (field.name) field.value = place.get(field.name) || (field.name === "order" ? "newest" : "");
  place.delete("id");
  try {
    if (drawn !== String(place)) {
      put("title", "Reading…");
      drawLines(await ask(`trajectories.json?${place}`), place);
      drawn = String(place);
    }
    if (identity) drawOne(await ask(`trajectory.json?id=${encodeURIComponent(identity)}`));
    else document.getElementById("one").hidden = true;
  } catch (error) {
    put("title", error.message);
  }
  document.body.dataset.drawn = location.hash;
}
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const place = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
  if (`#${place}` === location.hash) drawn = null;
  location.hash = String(place);
});
addEventListener("hashchange", show);
show();
