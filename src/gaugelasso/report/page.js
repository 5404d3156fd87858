// The explorer of a report page: a scrubber through training steps, structure, figures, curves.
//
// Names come from run folders, so text enters the page only as text nodes, never as markup.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const DASH = "—";
  const runs = data.runs;
  const last = Math.max(...runs.map((run) => run.last));
  let chosen = runs.length > 1 ? -1 : 0; // -1: all seeds
  let step = last;

  // Numbers as the tables of the report write them.
  const figure = (v) => (v === null ? DASH : String(Number(v.toPrecision(4))));
  const count = (v) =>
    v === null ? DASH : v.toLocaleString("en-US", {
      maximumFractionDigits: v >= 1000 || Number.isInteger(v) ? 0 : 1,
    });
  const work = (v) => (data.noun === "ms" ? figure(v) : count(v));
  const ratio = (v) => {
    const digits = v < 10 ? 2 : v < 100 ? 1 : 0;
    return Number.isFinite(v) ? v.toLocaleString("en-US", {
      minimumFractionDigits: digits, maximumFractionDigits: digits,
    }) + "×" : DASH;
  };
  const score = (v) => (v !== null && data.metric.percent ? (100 * v).toFixed(2) + "%" : figure(v));
  const ms = (v) => (v === null ? DASH : v.toFixed(v >= 10 ? 1 : 2) + " ms");
  const short = (v) => {
    for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(v) >= size * 0.9995) return Number((v / size).toPrecision(3)) + letter;
    return String(Number(v.toPrecision(3)));
  };

  const make = (tag, parent, text, kind) => {
    const found = parent.appendChild(document.createElement(tag));
    if (text !== undefined) found.textContent = text;
    if (kind) found.className = kind;
    return found;
  };
  const draw = (tag, parent, attributes) => {
    const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const key in attributes) found.setAttribute(key, attributes[key]);
    return parent.appendChild(found);
  };

  // The place of the last value that is not above `x`; 0 if there is none.
  const placeOf = (values, x) => {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] <= x) low = middle + 1;
      else high = middle;
    }
    return Math.max(0, low - 1);
  };
  // As in the tables: figures of several seeds are means, and none if one seed has none.
  const mean = (values) =>
    values.includes(null) ? null : values.reduce((sum, v) => sum + v, 0) / values.length;
  // Of widths, because a mean of a kept and a removed operator is a width that no seed has.
  const median = (values) => {
    const sorted = values.slice().sort((a, b) => a - b), half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  };

  // A frame stores what differs from the frame before.
  for (const run of runs) {
    let widths = data.axes.map(() => 0);
    run.frames.widths = run.frames.changes.map((changes) => {
      widths = widths.slice();
      for (let i = 0; i < changes.length; i += 2) widths[changes[i]] = changes[i + 1];
      return widths;
    });
  }
  const shown = () => (chosen < 0 ? runs : [runs[chosen]]);
  const frameOf = (run) => placeOf(run.frames.step, step);
  const ended = (run) => run.final !== null && step >= run.last;

  const workCurve = (run) => {
    const { step: steps, fma } = run.frames;
    return [[...steps, run.last], [...fma, fma[fma.length - 1]]];
  };
  const charts = [
    { kind: "loss", name: "training loss", curve: (run) => run.curves.loss, log: true, form: figure,
      target: true },
    { kind: "work", name: data.unit, curve: workCurve, log: true, form: work, steps: true },
    { kind: "metric", name: data.metric.name, curve: (run) => run.curves.metric, form: score,
      top: data.metric.percent ? 1 : 0, foot: data.metric.percent ? 0 : null },
    { kind: "time", name: "step time (running median)", curve: (run) => run.curves.step_ms, form: ms, foot: 0 },
  ].filter((chart) => runs.some((run) => chart.curve(run)[0].length));
  // A row is the mean of the interval that ends at it. Between two rows the value is that of the
  // line which is drawn, straight on the chart's scale; before the first row it is that of the row.
  const valueAt = (kind, run) => {
    const chart = charts.find((each) => each.kind === kind);
    const [steps, values] = chart ? chart.curve(run) : [[]];
    if (!steps.length) return null;
    const at = Math.min(step, run.last), i = placeOf(steps, at), next = i + 1;
    if (chart.steps || at <= steps[i] || next === steps.length) return values[i];
    const share = (at - steps[i]) / (steps[next] - steps[i]);
    return chart.scale.log
      ? values[i] * (values[next] / values[i]) ** share
      : values[i] + share * (values[next] - values[i]);
  };

  // Figures at the step.
  const tiles = {};
  for (const key of ["work", "ratio", "parameters", "loss", "metric", "time"]) {
    const box = make("div", $("figures"));
    tiles[key] = { name: make("dt", box), value: make("dd", box) };
    tiles[key].value.dataset.figure = key;
  }
  const tell = (key, name, values, form) => {
    const { name: dt, value: dd } = tiles[key];
    dt.textContent = name;
    dd.textContent = form(mean(values));
    const known = values.filter((v) => v !== null);
    const low = Math.min(...known), high = Math.max(...known);
    if (known.length > 1 && low < high) make("small", dd, `${form(low)} – ${form(high)}`);
  };
  const figures = () => {
    const list = shown(), final = list.every(ended);
    const now = list.map((run) => {
      const frame = frameOf(run), first = run.frames.fma[0];
      return final
        ? { ...run.final, first }
        : { first, fma: run.frames.fma[frame], parameters: run.frames.parameters[frame],
            loss: valueAt("loss", run), metric: valueAt("metric", run),
            time: valueAt("time", run) };
    });
    tell("work", data.unit, now.map((n) => n.fma), work);
    tell("ratio", "smaller", now.map((n) => (n.fma ? n.first / n.fma : Infinity)), ratio);
    tell("parameters", "parameters", now.map((n) => n.parameters), count);
    tell("loss", final ? data.loss + ", final" : "training loss", now.map((n) => n.loss), figure);
    tell("metric", data.metric.name + (final ? ", final" : ""), now.map((n) => n.metric), score);
    // A loop of one's own may measure no metric before the end, or none but the loss.
    tiles.metric.name.parentElement.hidden = final
      ? data.metric.name === data.loss
      : !charts.some((chart) => chart.kind === "metric");
    tell("time", (final ? "last " : "") + "step time", now.map((n) => n.time), ms);
  };
  const phaseOf = (run) => {
    const found = run.phases.find(([end]) => step <= end) || run.phases[run.phases.length - 1];
    return found ? found[1] : "";
  };
  const eventText = () => {
    if (chosen < 0) {
      const some = runs.some((run) => run.frames.step.length > 1);
      return `Means of ${runs.length} seeds, with ranges.` +
        (some ? " Choose a seed to see its events." : "");
    }
    const run = runs[chosen], { step: at, fma, text, events } = run.frames, i = frameOf(run);
    if (!i) return "No structural event yet: the initial structure.";
    const skipped = events[i] > 1 ? ` (with ${events[i] - 1} events before it)` : "";
    const change = `${work(fma[i - 1])} → ${work(fma[i])} ${data.unit}`;
    return `Event at step ${count(at[i])}${skipped}: ${change}${text[i] ? "; " + text[i] : ""}.`;
  };

  // The structure: a cell shows the width of one axis.
  const cells = [];
  const cellOf = (host, axis, where, kind, name) => {
    const number = make("span", host);
    const track = make("div", host, undefined, "bar");
    const range = make("u", track), bar = make("b", track);
    const cell = { host, axis, number, range, bar, title: where + [kind, name].filter(Boolean).join(", ") };
    host.dataset.axis = data.axes[axis];
    for (const name of ["pointerenter", "pointerdown", "pointermove"])
      host.addEventListener(name, (event) => tip(cell, event));
    // A finger that lifts leaves as well, and its tip would go before it is read.
    host.addEventListener("pointerleave", (event) => event.pointerType === "touch" || hideTip());
    cells.push(cell);
  };
  const build = () => {
    const layers = data.ends.length > 0;
    for (const { kind, name, axis } of data.ends) {
      const host = make("div", $("ends"), undefined, "end");
      make("small", host, `${kind}: ${name}`);
      cellOf(host, axis, "", kind, name);
    }
    const table = $("structure");
    table.className = "structure " + (layers ? "layers" : "axes");
    const head = make("tr", make("thead", table));
    make("th", head, layers ? "layer" : "axis");
    for (const { kind, name } of data.columns) {
      const th = make("th", head, kind);
      make("small", th, name);
    }
    const body = make("tbody", table);
    for (const row of data.rows) {
      const tr = make("tr", body);
      make("th", tr, row.name);
      row.cells.forEach((axis, i) => {
        const td = make("td", tr, undefined, i < 4 ? "attention" : "mlp");
        const { kind, name } = data.columns[i];
        if (axis === null) td.classList.add("never");
        else if (layers) cellOf(td, axis, `layer ${row.name}: `, kind, name);
        else cellOf(td, axis, row.name, "", "");
      });
    }
  };
  const widthsOf = (axis) => shown().map((run) => run.frames.widths[frameOf(run)][axis]);
  const initialOf = (axis) => Math.max(1, ...shown().map((run) => run.frames.widths[0][axis]));
  const structure = () => {
    for (const cell of cells) {
      const widths = widthsOf(cell.axis), middle = median(widths), whole = initialOf(cell.axis);
      cell.number.textContent = middle ? count(middle) : DASH;
      cell.host.classList.toggle("gone", !middle);
      cell.bar.style.width = `max(${Math.min(100, (100 * middle) / whole)}%, ${middle ? 1.5 : 0}px)`;
      const high = Math.max(...widths);
      cell.range.style.width = high > middle ? `${(100 * high) / whole}%` : "0";
    }
  };
  const tip = (cell, event) => {
    const widths = widthsOf(cell.axis), middle = median(widths), whole = initialOf(cell.axis);
    const share = `${count(middle)} of initially ${count(whole)} channels (${figure((100 * middle) / whole)}%)`;
    const low = Math.min(...widths), high = Math.max(...widths);
    const range = low < high ? `; ${count(low)} – ${count(high)} over seeds` : "";
    const box = $("tip");
    box.textContent = `${cell.title}. ${middle ? share : "removed, of " + count(whole)}${range}.`;
    box.hidden = false;
    const room = document.documentElement.clientWidth - box.offsetWidth - 8;
    box.style.left = `${Math.max(8, Math.min(event.clientX + 12, room))}px`;
    const above = event.clientY - box.offsetHeight - 14;
    box.style.top = `${above > 4 ? above : event.clientY + 18}px`;
  };

  const hideTip = () => ($("tip").hidden = true);
  addEventListener("scroll", hideTip, { passive: true });
  // Before the bar that is pressed shows its own.
  addEventListener("pointerdown", hideTip, { capture: true });

  // Curves.
  const niceSteps = (low, high, most) => {
    const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
    const size = power * [1, 2, 5, 10].find((m) => m * power >= raw);
    const ticks = [];
    for (let i = Math.ceil(low / size - 1e-9); i * size <= high * (1 + 1e-9); i++) ticks.push(i * size);
    return ticks.length > 1 || most > 9 ? ticks : niceSteps(low, high, 2 * most);
  };
  const logTicks = (low, high) => {
    const ticks = [], first = Math.floor(Math.log10(low)), end = Math.ceil(Math.log10(high));
    const every = Math.ceil((end - first) / 5);
    for (let e = first; e <= end; e++)
      for (const m of end - first > 2 ? [1] : [1, 2, 5])
        if (m > 1 || (e - first) % every === 0) ticks.push(m * 10 ** e);
    const inside = ticks.filter((t) => t >= low && t <= high);
    return inside.length > 1 ? inside : niceSteps(low, high, 4).filter((t) => t > 0);
  };
  const PAD = { left: 44, right: 10, top: 8, bottom: 20 };
  const HEIGHT = 190;
  const scaleOf = (chart) => {
    let values = runs.flatMap((run) => chart.curve(run)[1]);
    if (chart.target) values = values.concat(runs.map((r) => r.target).filter((t) => t !== null));
    let low = Infinity, high = -Infinity;
    for (const v of values) { low = Math.min(low, v); high = Math.max(high, v); }
    const log = low > 0 && (chart.log || (chart.foot === null && high / low > 20));
    if (log) return { log, low: low / 1.15, high: high * 1.15 };
    const air = 0.06 * (high - low || Math.abs(high) || 1);
    const foot = chart.foot === 0 ? 0 : low - air;
    return { log, low: foot, high: chart.top ? chart.top * 1.03 : high + air };
  };
  const drawChart = (chart) => {
    const svg = chart.svg, width = Math.max(200, svg.clientWidth);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const { log, low, high } = chart.scale;
    const place = log ? Math.log : (v) => v;
    chart.x = (s) => PAD.left + ((width - PAD.left - PAD.right) * s) / Math.max(1, last);
    chart.y = (v) => {
      const share = (place(v) - place(low)) / (place(high) - place(low));
      return HEIGHT - PAD.bottom - (HEIGHT - PAD.top - PAD.bottom) * Math.max(0, Math.min(1, share));
    };
    const [left, right] = [chart.x(0), chart.x(last)];
    for (const tick of log ? logTicks(low, high) : niceSteps(low, high, 4)) {
      const y = chart.y(tick);
      draw("line", svg, { class: "grid", x1: left, x2: right, y1: y, y2: y });
      const label = draw("text", svg, { x: left - 5, y: y + 4, "text-anchor": "end" });
      label.textContent = chart.top === 1 ? `${Math.round(100 * tick)}%` : short(tick);
    }
    for (const tick of niceSteps(0, last, width < 420 ? 4 : 6)) {
      const anchor = tick === 0 ? "start" : chart.x(tick) > width - 24 ? "end" : "middle";
      const label = draw("text", svg, { x: chart.x(tick), y: HEIGHT - 4, "text-anchor": anchor });
      label.textContent = short(tick);
    }
    for (const run of shown())
      if (run.cooldown !== null) {
        const x = chart.x(run.cooldown);
        draw("line", svg, { class: "cool", x1: x, x2: x, y1: PAD.top, y2: HEIGHT - PAD.bottom });
      }
    if (chart.target)
      for (const goal of new Set(shown().map((r) => r.target).filter((t) => t !== null)))
        draw("line", svg, { class: "target", x1: left, x2: right, y1: chart.y(goal), y2: chart.y(goal) });
    runs.forEach((run, i) => {
      const [steps, values] = chart.curve(run);
      let path = "";
      steps.forEach((s, j) => {
        const [x, y] = [chart.x(s).toFixed(1), chart.y(values[j]).toFixed(1)];
        path += !j ? `M${x} ${y}` : chart.steps ? `H${x}V${y}` : `L${x} ${y}`;
      });
      // A single point is a line of no length, whose round ends are seen.
      const alone = steps.length === 1;
      draw("path", svg, { d: path + (alone ? "h0" : ""),
        class: (i === chosen ? "one" : "other") + (alone ? " alone" : "") });
    });
    if (chosen >= 0) svg.append(svg.querySelector("path.one")); // above the others
    chart.line = draw("line", svg, { class: "now", y1: PAD.top, y2: HEIGHT - PAD.bottom });
    chart.dot = draw("circle", svg, { r: 4.5 });
  };
  const moveCursor = (chart) => {
    const x = chart.x(step);
    chart.line.setAttribute("x1", x);
    chart.line.setAttribute("x2", x);
    const value = mean(shown().map((run) => valueAt(chart.kind, run)));
    chart.dot.style.display = value === null ? "none" : "";
    if (value !== null) {
      // On the line also where it has not begun, or has ended.
      const steps = shown().flatMap((run) => chart.curve(run)[0]);
      const at = Math.max(Math.min(...steps), Math.min(Math.max(...steps), step));
      chart.dot.setAttribute("cx", chart.x(at));
      chart.dot.setAttribute("cy", chart.y(value));
    }
    chart.value.textContent = chart.form(value);
  };
  const buildCharts = () => {
    for (const chart of charts) {
      const box = make("figure", $("curves"), undefined, chart.kind);
      const caption = make("figcaption", box);
      make("span", caption, chart.name + (runs.length > 1 ? ", each seed" : ""));
      chart.value = make("b", caption);
      chart.svg = draw("svg", box, { role: "img", "aria-label": `${chart.name} against training step` });
      const seek = (event) => {
        const at = event.clientX - chart.svg.getBoundingClientRect().left;
        stop();
        show(Math.round(((at - chart.x(0)) / (chart.x(last) - chart.x(0))) * last));
      };
      chart.svg.addEventListener("pointerdown", (event) => event.button === 0 && seek(event));
      chart.svg.addEventListener("pointermove", (event) => event.buttons & 1 && seek(event));
    }
  };
  const timeline = () => {
    const svg = $("timeline"), width = Math.max(100, svg.clientWidth), thumb = 10;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} 18`);
    for (const run of shown()) {
      const { step: steps, fma, back } = run.frames;
      for (let i = 1; i < steps.length; i++) {
        const x = thumb + ((width - 2 * thumb) * steps[i]) / Math.max(1, last);
        const share = Math.abs(Math.log(Math.max(fma[i], 1e-9) / Math.max(fma[i - 1], 1e-9)));
        const height = 3 + 15 * Math.min(1, share / 0.25);
        draw("line", svg, { x1: x, x2: x, y1: 0, y2: height,
          class: back[i] ? "back" : "cut", "stroke-opacity": shown().length > 1 ? 0.3 : 0.8 });
      }
    }
  };

  const show = (to) => {
    step = Math.max(0, Math.min(last, to));
    $("step").value = step;
    const phases = [...new Set(shown().map(phaseOf))].filter(Boolean).join(", ");
    const now = `step ${count(step)} of ${count(last)}` + (phases ? `, ${phases}` : "");
    $("now").textContent = now;
    figures();
    $("step").setAttribute("aria-valuetext", `${now}, ${tiles.work.value.firstChild.data} ${data.unit}`);
    hideTip(); // its numbers are of another step
    $("event").textContent = eventText();
    structure();
    charts.forEach(moveCursor);
  };
  const redraw = () => {
    timeline();
    charts.forEach(drawChart);
    show(step);
  };

  // Playing takes eight seconds for a whole run.
  let playing = null;
  const stop = () => {
    cancelAnimationFrame(playing);
    playing = null;
    $("play").textContent = "Play";
    $("now").ariaLive = "polite";
  };
  $("play").addEventListener("click", () => {
    if (playing !== null) {
      stop();
      return show(step); // read aloud
    }
    let from = step >= last ? 0 : step, begun = null;
    $("play").textContent = "Pause";
    $("now").ariaLive = "off";
    const advance = (time) => {
      begun ??= time;
      const to = Math.round(from + (last * (time - begun)) / 8000);
      if (to >= last) stop();
      else playing = requestAnimationFrame(advance);
      show(to);
    };
    playing = requestAnimationFrame(advance);
  });
  $("step").max = last;
  $("step").addEventListener("input", () => {
    stop();
    show(Number($("step").value));
  });
  if (runs.length > 1) {
    const select = $("run");
    make("option", select, `mean of ${runs.length} seeds`).value = -1;
    runs.forEach((run, i) => (make("option", select, run.title).value = i));
    select.hidden = false;
    select.addEventListener("change", () => {
      chosen = Number(select.value);
      redraw();
    });
  }
  $("explorer").hidden = false;
  build();
  for (const chart of charts) chart.scale = scaleOf(chart);
  buildCharts();
  redraw();
  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (width === document.documentElement.clientWidth) return; // a phone's address bar moves
    width = document.documentElement.clientWidth;
    redraw();
  });
})();
