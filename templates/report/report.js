// Draws the charts of a report with uPlot, from the JSON in #data; builds their tables when they are opened.
"use strict";
(() => {
  const COLORS = 8;
  // distances between ticks of an axis of time, in seconds
  const SECONDS = [0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 432000, 864000];
  const drawn = new Map(); // by the chart's name
  const kept = new Map(); // by the chart's name: the axis shown and the range zoomed into
  let specs = new Map();

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const element = (tag, text, attributes = {}) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };

  function number(value) {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    if (Number.isInteger(value) || size >= 10000) return Math.round(value).toLocaleString("en");
    if (size !== 0 && size < 0.0001) return Number(value.toPrecision(3)).toExponential();
    return String(Number(value.toPrecision(5)));
  }

  function duration(seconds) {
    if (seconds < 60) return `${Number(seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
    const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
    if (days >= 2) return `${days} d ${hours % 24} h`;
    if (hours) return `${hours} h ${minutes % 60} min`;
    return seconds % 60 < 0.5 ? `${minutes} min` : `${minutes} min ${Math.round(seconds % 60)} s`;
  }

  const shownX = (axis, value) => (axis === "seconds" ? duration(value) : number(value));

  // uPlot's columns of a chart: x, then one for each series.
  function columns(spec, axis) {
    if (spec.kind === "spans") return [[0, Math.max(...spec.spans.map((span) => span.end))], [null, null]];
    const tables = spec.series.map((series) => {
      const xs = series.x[axis] ?? [], table = [[], []];
      xs.forEach((x, index) => {
        if (x === null) return;
        table[0].push(x);
        table[1].push(series.y[index]);
      });
      return table;
    });
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  const color = (series) => css(`--c${((series.color - 1) % COLORS) + 1}`);

  function seriesOptions(spec, series) {
    const stroke = color(series);
    const options = { label: series.label, stroke, width: 2, value: (_, value) => number(value), points: { show: false } };
    if (series.style === "pale") Object.assign(options, { width: 1, alpha: 0.4 });
    if (series.style === "level") Object.assign(options, { dash: [6, 5], width: 1.5 });
    if (series.style === "dots") options.points = { show: true, size: 6, fill: stroke };
    if (spec.kind === "bars") Object.assign(options, { fill: stroke, width: 0, paths: uPlot.paths.bars({ size: [0.9, 80] }) });
    return options;
  }

  // The color of a curve in the legend: as pale as the curve.
  const marker = (series) => (series.style === "pale" ? `color-mix(in srgb, ${color(series)} 40%, transparent)` : color(series));

  function drawMarks(plot, spec, axis) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = css("--lost");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const mark of spec.marks) {
      const at = mark.x[axis] === undefined ? NaN : plot.valToPos(mark.x[axis], "x", true);
      if (!(at >= bbox.left && at <= bbox.left + bbox.width)) continue;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function drawSpans(plot, spec) {
    const { ctx, bbox } = plot, line = bbox.height / spec.rows.length;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const span of spec.spans) {
      const from = plot.valToPos(span.start, "x", true), to = plot.valToPos(span.end, "x", true);
      const thin = span.activity === "waiting" ? 0.36 : 0.14;
      ctx.fillStyle = css(`--${span.activity}`);
      ctx.fillRect(from, bbox.top + line * (span.row + thin), Math.max(devicePixelRatio, to - from), line * (1 - 2 * thin));
    }
    ctx.restore();
  }

  const spanText = (spec, span) =>
    `${spec.rows[span.row]}: ${span.text}, ${duration(span.end - span.start)}` +
    ` (${duration(span.start)} to ${duration(span.end)} after submission)`;

  // What the cursor points at, in words.
  function reading(plot, spec, axis) {
    const { left, top, idx } = plot.cursor;
    if (left === null || left < 0) return "";
    if (spec.kind === "spans") {
      const row = Math.floor((top / plot.over.clientHeight) * spec.rows.length), at = plot.posToVal(left, "x");
      const span = spec.spans.findLast((one) => one.row === row && one.start <= at && at <= one.end);
      return span ? spanText(spec, span) : "";
    }
    if (idx === null || idx === undefined) return "";
    const x = plot.data[0][idx];
    const where = spec.kind === "bars"
      ? `${number(x - spec.bin_width / 2)} to ${number(x + spec.bin_width / 2 - 1)} tokens`
      : `${spec.axes[axis]} ${shownX(axis, x)}`;
    const values = spec.series
      .map((series, index) => [series.label, plot.data[index + 1][idx]])
      .filter(([, value]) => value !== null && value !== undefined);
    return [where, ...values.map(([label, value]) => `${label} ${number(value)}`)].join("; ");
  }

  function options(spec, axis, width, figure) {
    const text = css("--soft"), grid = { stroke: css("--grid"), width: 1 }, ticks = { stroke: css("--line"), width: 1, size: 4 };
    const font = "12px system-ui, sans-serif";
    const axisStyle = { stroke: text, grid, ticks, font, labelFont: font, gap: 4 };
    const readout = figure.querySelector(".readout");
    const spans = spec.kind === "spans", rows = spec.rows.length;
    const known = { // of the axes
      x: { ...axisStyle, label: spec.axes[axis], size: 26, labelSize: 18, labelGap: 0, space: axis === "seconds" ? 80 : 48,
        ...(axis === "seconds" ? { incrs: SECONDS } : {}), values: (_, ticksAt) => ticksAt.map((x) => shownX(axis, x)) },
      y: { ...axisStyle, size: 62, values: (_, ticksAt) => ticksAt.map(number) },
    };
    if (spans) {
      known.y = { ...axisStyle, grid: { show: false }, ticks: { show: false }, size: 86,
        splits: () => spec.rows.map((_, row) => rows - row - 0.5), values: () => spec.rows };
    }
    const range = spans ? [0, rows] : spec.from_zero ? (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.06 : 1] : undefined;
    return {
      width,
      height: spans ? 56 + 34 * rows : figure.closest(".grid") ? 230 : 340,
      scales: { x: { time: false }, y: range ? { range } : {} },
      axes: [known.x, known.y],
      series: [{ label: spec.axes[axis], value: (_, value) => (value === null ? "" : shownX(axis, value)) },
        ...(spans ? [{ show: false }] : spec.series.map((series) => seriesOptions(spec, series)))],
      legend: { show: !spans && spec.series.length > 1, live: false, markers: { width: 0, fill: (_, index) => marker(spec.series[index - 1]) } },
      cursor: { y: false, drag: { x: true, y: false, setScale: true }, points: { show: !spans } },
      hooks: {
        draw: [(plot) => (spans ? drawSpans(plot, spec) : drawMarks(plot, spec, axis))],
        setCursor: [(plot) => { readout.textContent = reading(plot, spec, axis); }],
        setScale: [(plot, key) => {
          if (key !== "x") return;
          const { min, max } = plot.scales.x, [first, last] = ends(plot);
          kept.set(spec.name, { axis, range: min > first || max < last ? [min, max] : null });
        }],
      },
    };
  }

  const ends = (plot) => [plot.data[0][0], plot.data[0][plot.data[0].length - 1]];

  function zoom(plot, factor) {
    const { min, max } = plot.scales.x, [first, last] = ends(plot);
    const at = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : (min + max) / 2;
    const low = Math.max(first, at - (at - min) * factor), high = Math.min(last, at + (max - at) * factor);
    if (high > low) plot.setScale("x", { min: low, max: high });
  }

  const whole = (plot) => plot.setData(plot.data, true);

  function point(plot, index) {
    const x = plot.data[0][index];
    if (x < plot.scales.x.min || x > plot.scales.x.max) whole(plot);
    plot.setCursor({ left: plot.valToPos(x, "x"), top: plot.over.clientHeight / 2 });
  }

  // Moves the cursor to the next point, or of a timeline to the next span.
  function step(plot, spec, by) {
    if (spec.kind === "spans") {
      const figure = drawn.get(spec.name);
      figure.span = Math.min(spec.spans.length - 1, Math.max(0, (figure.span ?? -1) + by));
      const span = spec.spans[figure.span], middle = (span.start + span.end) / 2;
      if (middle < plot.scales.x.min || middle > plot.scales.x.max) whole(plot);
      const top = ((span.row + 0.5) / spec.rows.length) * plot.over.clientHeight;
      plot.setCursor({ left: plot.valToPos(middle, "x"), top });
      return;
    }
    const last = plot.data[0].length - 1, now = plot.cursor.left >= 0 ? plot.cursor.idx : by > 0 ? -1 : last + 1;
    point(plot, Math.min(last, Math.max(0, now + by)));
  }

  function keys(event, spec) {
    const { plot } = drawn.get(spec.name);
    const last = plot.data[0].length - 1;
    const actions = {
      ArrowLeft: () => step(plot, spec, -1), ArrowRight: () => step(plot, spec, 1),
      Home: () => point(plot, 0), End: () => point(plot, last),
      "+": () => zoom(plot, 0.5), "=": () => zoom(plot, 0.5), "-": () => zoom(plot, 2), Escape: () => whole(plot),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  function controls(figure, spec, axis) {
    const bar = figure.querySelector(".controls"), axes = element("div", undefined, { class: "axes" });
    const offered = Object.entries(spec.axes).filter(([name]) => spec.kind !== "lines" || spec.series.some((one) => one.x[name]));
    if (offered.length > 1) {
      for (const [name, label] of offered) {
        const button = element("button", label, { type: "button", "aria-pressed": String(name === axis) });
        button.addEventListener("click", () => { kept.set(spec.name, { axis: name, range: null }); draw(figure, spec); });
        axes.append(button);
      }
    }
    const button = (text, label, action) => {
      const made = element("button", text, { type: "button", "aria-label": `${label}, ${spec.label || spec.name}` });
      made.addEventListener("click", () => action(drawn.get(spec.name).plot));
      return made;
    };
    const focused = bar.contains(document.activeElement) ? [...bar.querySelectorAll("button")].indexOf(document.activeElement) : -1;
    const range = element("div", undefined, { class: "range" });
    range.append(button("+", "zoom in", (plot) => zoom(plot, 0.5)), button("−", "zoom out", (plot) => zoom(plot, 2)),
      button("whole range", "show the whole range", whole));
    bar.replaceChildren(axes, range);
    if (focused >= 0) bar.querySelectorAll("button")[focused].focus();
  }

  function draw(figure, spec) {
    const target = figure.querySelector(".plot"), earlier = drawn.get(spec.name);
    const view = kept.get(spec.name) ?? { axis: Object.keys(spec.axes)[0], range: null };
    if (earlier) earlier.plot.destroy();
    controls(figure, spec, view.axis);
    const plot = new uPlot(options(spec, view.axis, target.clientWidth, figure), columns(spec, view.axis), target);
    drawn.set(spec.name, { plot, figure });
    if (view.range) plot.setScale("x", { min: view.range[0], max: view.range[1] });
    fillTable(figure, spec);
  }

  function fillTable(figure, spec) {
    const details = figure.querySelector("details"), box = details.querySelector(".scroll");
    if (!details.open) return box.replaceChildren();
    const { axis } = kept.get(spec.name) ?? { axis: Object.keys(spec.axes)[0] };
    const table = element("table"), head = table.createTHead().insertRow(), body = table.createTBody();
    const line = (cells) => {
      const row = body.insertRow();
      for (const cell of cells) row.insertCell().textContent = cell;
    };
    let names;
    if (spec.kind === "spans") {
      names = ["Stage", "Activity", "From", "To", "Seconds", "What"];
      spec.spans.forEach((span) => line([spec.rows[span.row], span.activity, duration(span.start), duration(span.end),
        (span.end - span.start).toFixed(1), span.text]));
    } else if (spec.kind === "bars") {
      names = ["Tokens", ...spec.series.map((series) => series.label)];
      spec.series[0].y.forEach((count, bin) => line([`${bin * spec.bin_width} to ${(bin + 1) * spec.bin_width - 1}`, number(count)]));
    } else {
      names = [spec.axes[axis], ...spec.series.map((series) => series.label)];
      const [xs, ...ys] = columns(spec, axis);
      xs.forEach((x, index) => line([shownX(axis, x), ...ys.map((y) => number(y[index]))]));
    }
    for (const name of names) head.append(element("th", name, { scope: "col" }));
    box.replaceChildren(table);
  }

  function start() {
    specs = new Map(JSON.parse(document.getElementById("data").textContent).charts.map((spec) => [spec.name, spec]));
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const spec = specs.get(figure.dataset.chart), target = figure.querySelector(".plot");
      drawn.delete(spec.name);
      draw(figure, spec);
      target.addEventListener("keydown", (event) => keys(event, spec));
      figure.querySelector("details").addEventListener("toggle", () => fillTable(figure, spec));
      new ResizeObserver(() => {
        if (!target.isConnected) return;
        const { plot } = drawn.get(spec.name);
        if (Math.abs(plot.width - target.clientWidth) > 1) plot.setSize({ width: target.clientWidth, height: plot.height });
      }).observe(target);
    }
  }

  function redraw() {
    for (const figure of document.querySelectorAll("figure[data-chart]")) draw(figure, specs.get(figure.dataset.chart));
  }

  // Of a page that a server keeps up to date: what is open and zoomed into stays so.
  async function refresh() {
    const status = document.getElementById("refreshed");
    let page;
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(10_000) });
      if (!answer.ok) throw new Error(answer.statusText);
      page = new DOMParser().parseFromString(await answer.text(), "text/html");
    } catch {
      status.textContent = "The server no longer answers: this page shows the state above.";
      return;
    }
    const open = [...document.querySelectorAll("details[open]")].map((details) => details.id);
    const scrolled = window.scrollY;
    for (const { plot } of drawn.values()) plot.destroy();
    drawn.clear();
    document.querySelector("main").replaceWith(page.querySelector("main"));
    document.getElementById("data").textContent = page.getElementById("data").textContent;
    document.title = page.title;
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    start();
    window.scrollTo(0, scrolled);
  }

  start();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => { document.documentElement.classList.add("print"); redraw(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); redraw(); });
  const seconds = Number(document.body.dataset.refreshSeconds);
  if (seconds) setInterval(() => { if (!document.hidden) refresh(); }, seconds * 1000);
})();
