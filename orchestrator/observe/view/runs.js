"use strict";
// The runs of a folder. Every event is the whole list; a run's name leads to its own page on this server.

function state(run) {
  if (run.state === "silent") return html("span", { class: "status-failed" }, `silent for ${clock(run.silent)}`);
  return html("span", { class: `status-${["running", "starting", "reading the log"].includes(run.state) ? "completed" : run.state}`, title: run.reason }, run.state);
}

function draw(now) {
  document.title = `${now.folder} · rl-coserve`;
  put("name", now.folder);
  const going = now.runs.filter((run) => run.state === "running" || run.state === "starting").length;
  const older = now.older ? [html("span", {}, `${count(now.older)} older ones are not shown`)] : [];
  put("meta", html("span", {}, `${count(going)} of ${count(now.runs.length)} running`), ...older);
  put("runs", now.runs.length
    ? table("Runs", ["Run", "State", "Mode", "Step", "Success", "Reward", "In flight", "Staleness", "Faults", "Time"],
      now.runs.map((run) => [
        html("a", { href: `run/${encodeURIComponent(run.folder)}/` }, run.folder), state(run),
        run.kind === "real" ? run.mode || "–" : `${run.mode}, simulated`, `${count(run.step)} of ${count(run.steps)}`,
        run.success === null ? "–" : percent(run.success), brief(run.reward), count(run.in_flight),
        brief(run.lag), count(run.faults), clock(run.t)]), [3, 4, 5, 6, 7, 8, 9])
    : empty("There is no run yet."));
  document.body.dataset.drawn = String(now.runs.length);
}

follow(draw, () => ["The server does not answer; trying again.", "lost"]);
