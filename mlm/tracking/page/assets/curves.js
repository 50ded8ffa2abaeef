// Draws the curves of the page from the JSON in #data. uPlot is in the page already.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = document.getElementById("charts");
  const form = document.getElementById("controls");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const COLOURS = 7; // --run0 … of the style sheet
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  const HEIGHT = 230;
  const STORE = "mlm-report " + location.pathname;
  const AXES = { step: "steps", tokens: "tokens", time: "time, h:mm:ss" };
  const state = { axis: "step", smooth: 0, log: false, hidden: [], range: null };
  const plots = []; // {chart, box, cells, u}

  const element = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const stroke = (run) => colour("--run" + (run % COLOURS));
  const dash = (run) => DASHES[(run + Math.floor(run / (COLOURS * DASHES.length))) % DASHES.length];

  // --- numbers as text

  const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
  const short = (value) => {
    if (Math.abs(value) >= 1e15) return (+value.toPrecision(4)).toExponential();
    const unit = UNITS.find(([size]) => Math.abs(value) >= size);
    return unit ? +(value / unit[0]).toPrecision(4) + unit[1] : String(+value.toPrecision(4));
  };
  const clock = (seconds) => {
    const two = (n) => String(n).padStart(2, "0");
    const s = Math.round(seconds);
    return Math.floor(s / 3600) + ":" + two(Math.floor(s / 60) % 60) + ":" + two(s % 60);
  };
  const amount = (value) => {
    if (value == null) return "–";
    return Math.abs(value) >= 1e5 ? short(value) : String(+value.toPrecision(6));
  };
  const position = (value) => (state.axis === "time" ? clock(value) : short(value));

  // --- curves

  const finite = (x, y) => {
    const keep = x.map((_, n) => n).filter((n) => x[n] != null);
    return [keep.map((n) => x[n]), keep.map((n) => y[n])];
  };

  // Exponential moving average without a bias towards 0 at its start; gaps stay gaps.
  const smoothed = (y) => {
    let mean = 0, weight = 0;
    return y.map((value) => {
      if (value == null) return null;
      mean = state.smooth * mean + (1 - state.smooth) * value;
      weight = state.smooth * weight + (1 - state.smooth);
      return mean / weight;
    });
  };

  const lastOf = (y) => y.findLast((value) => value != null) ?? null;

  const tablesOf = (chart) => {
    const tables = [], series = [{}];
    data.runs.forEach((run, number) => {
      const curve = run.curves[chart.key];
      if (!curve || !curve[state.axis] || state.hidden.includes(number)) return;
      const look = { run: number, stroke: stroke(number), dash: dash(number), points: { size: 4 } };
      const [x, y] = finite(curve[state.axis], curve.y);
      if (!x.length) return;
      tables.push([x, y]);
      series.push({ ...look, width: 1.5, alpha: state.smooth ? 0.3 : 1, read: !state.smooth });
      if (state.smooth) {
        const source = curve.mean ?? curve;
        const [mx, my] = finite(source[state.axis], source.y);
        tables.push([mx, smoothed(my)]);
        series.push({ ...look, width: 2.5, read: true, points: { show: false } });
      }
    });
    return { tables, series };
  };

  // The index nearest to the cursor where a series has a value: runs log at different steps.
  const nearest = (u, series, index) => {
    const y = u.data[series];
    if (y[index] != null) return index;
    for (let off = 1; off < y.length; off++) {
      if (y[index - off] != null) return index - off;
      if (y[index + off] != null) return index + off;
    }
    return index;
  };

  const wholeRange = () => {
    let low = Infinity, high = -Infinity;
    data.runs.forEach((run, number) => {
      if (state.hidden.includes(number)) return;
      for (const { key } of data.charts) {
        const x = (run.curves[key]?.[state.axis] ?? []).filter((value) => value != null);
        if (x.length) [low, high] = [Math.min(low, x[0]), Math.max(high, x[x.length - 1])];
      }
    });
    return low < high ? [low, high] : [Math.min(low, high) - 1, Math.max(low, high) + 1];
  };

  const zoom = (range) => {
    const [low, high] = wholeRange();
    if (range) range = [Math.max(range[0], low), Math.min(range[1], high)];
    state.range = range && range[0] < range[1] ? range : null;
    const [min, max] = state.range ?? [low, high];
    for (const { u } of plots) u?.setScale("x", { min, max });
    save();
  };

  const read = (plot, u) => {
    for (const cell of Object.values(plot.cells)) {
      const curve = data.runs[cell.dataset.run].curves[plot.chart.key];
      let value = lastOf(curve.y), at = "last";
      const series = u?.series.findIndex((each) => each.read && each.run === +cell.dataset.run) ?? -1;
      const index = series > 0 ? u.cursor.idxs?.[series] : null;
      if (index != null) [value, at] = [u.data[series][index], position(u.data[0][index])];
      cell.textContent = amount(value);
      cell.nextSibling.textContent = at;
    }
  };

  const draw = (plot) => {
    plot.u?.destroy();
    plot.u = null;
    const { tables, series } = tablesOf(plot.chart);
    plot.box.hidden = !tables.length;
    if (!tables.length) return read(plot, null);
    const joined = uPlot.join(tables);
    const positive = tables.every(([, y]) => y.every((value) => value == null || value > 0));
    const axis = { stroke: colour("--ink"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const [min, max] = state.range ?? wholeRange();
    plot.u = new uPlot(
      {
        width: plot.box.clientWidth || 320,
        height: HEIGHT,
        legend: { show: false },
        scales: { x: { time: false }, y: { distr: state.log && positive ? 3 : 1 } },
        axes: [
          { ...axis, size: 34, space: 70, values: (_, at) => at.map((v) => (v == null ? "" : position(v))) },
          { ...axis, size: 62, values: (_, at) => at.map((v) => (v == null ? "" : amount(v))) },
        ],
        series,
        cursor: {
          dataIdx: nearest,
          drag: { x: true, y: false, setScale: false },
          sync: { key: "mlm", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
          bind: { dblclick: () => () => (zoom(null), null) },
        },
        hooks: {
          setCursor: [(u) => read(plot, u)],
          setSelect: [(u) => {
            const { left, width } = u.select;
            if (width < 4) return;
            const range = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            zoom(range);
          }],
        },
      },
      joined,
      plot.box,
    );
    plot.u.setScale("x", { min, max });
    read(plot, plot.u);
  };

  const drawAll = () => plots.forEach(draw);

  const keys = (plot, event) => {
    const { u } = plot;
    if (!u) return;
    const { min, max } = u.scales.x;
    const x = u.data[0];
    const at = u.cursor.idx ?? x.findLastIndex((value) => value <= max);
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -x.length, End: x.length }[event.key];
    if (steps) {
      const jump = event.shiftKey ? 20 * steps : steps;
      const inside = (n) => x[n] >= min && x[n] <= max;
      let to = Math.max(0, Math.min(x.length - 1, at + jump));
      while (!inside(to) && to !== at) to += Math.sign(at - to);
      u.setCursor({ left: u.valToPos(x[to], "x"), top: u.over.clientHeight / 2 });
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const middle = u.cursor.idx == null ? (min + max) / 2 : x[u.cursor.idx];
      const factor = event.key === "-" ? 2 : 0.5;
      zoom([middle - (middle - min) * factor, middle + (max - middle) * factor]);
    } else if (event.key === "Escape") {
      u.setCursor({ left: -10, top: -10 });
      zoom(null);
    } else return;
    event.preventDefault();
  };

  // --- what stays over a reload

  const save = () => {
    try { sessionStorage.setItem(STORE, JSON.stringify(state)); } catch { /* a page without storage starts anew */ }
  };
  const restore = () => {
    try { Object.assign(state, JSON.parse(sessionStorage.getItem(STORE) ?? "{}")); } catch { /* as above */ }
    if (!(state.axis in AXES)) state.axis = "step";
    state.hidden = state.hidden.filter((number) => number < data.runs.length);
  };

  // --- the page

  const swatches = () => {
    for (const svg of document.querySelectorAll("svg.swatch")) {
      const run = +svg.dataset.run;
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      const look = { x1: 0, x2: 34, y1: 4, y2: 4, "stroke-width": 3, stroke: `var(--run${run % COLOURS})` };
      for (const [name, value] of Object.entries(look)) line.setAttribute(name, value);
      line.setAttribute("stroke-dasharray", dash(run).join(" "));
      svg.replaceChildren(line);
    }
  };

  const swatch = (run) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "swatch");
    svg.setAttribute("viewBox", "0 0 34 8");
    svg.setAttribute("aria-hidden", "true");
    svg.dataset.run = run;
    return svg;
  };

  const addPlot = (chart) => {
    const box = element("div", { class: "plot", tabindex: "0", role: "group", "aria-label": chart.title });
    const body = element("tbody");
    const cells = {};
    data.runs.forEach((run, number) => {
      const curve = run.curves[chart.key];
      if (!curve) return;
      const cell = element("td", { "data-run": number, "data-key": chart.key, "data-last": lastOf(curve.y) });
      cells[number] = cell;
      const name = element("th", { scope: "row" }, swatch(number), " " + run.name);
      body.append(element("tr", {}, name, cell, element("td", { class: "at" })));
    });
    const caption = element("figcaption", {}, element("b", {}, chart.title), chart.unit ? " · " + chart.unit : "");
    charts.append(element("figure", {}, caption, box, element("table", { class: "readout" }, body)));
    const plot = { chart, box, cells, u: null };
    plots.push(plot);
    box.addEventListener("keydown", (event) => keys(plot, event));
    new ResizeObserver(() => {
      if (plot.u && box.clientWidth && plot.u.width !== box.clientWidth)
        plot.u.setSize({ width: box.clientWidth, height: HEIGHT });
    }).observe(box);
  };

  const addRuns = () => {
    const list = document.getElementById("shown");
    list.hidden = data.runs.length < 2;
    data.runs.forEach((run, number) => {
      const input = element("input", { type: "checkbox", name: "run", value: number });
      input.checked = !state.hidden.includes(number);
      list.append(element("label", {}, input, " ", swatch(number), " " + run.name));
    });
  };

  const showState = () => {
    form.axis.value = state.axis;
    form.smooth.value = state.smooth;
    form.log.checked = state.log;
    form.querySelector("output").textContent = (+state.smooth).toFixed(2);
  };

  const changed = () => {
    if (form.axis.value !== state.axis) state.range = null;
    state.axis = form.axis.value;
    state.smooth = +form.smooth.value;
    state.log = form.log.checked;
    state.hidden = [...form.querySelectorAll("input[name=run]:not(:checked)")].map((input) => +input.value);
    showState();
    save();
    drawAll();
  };

  const reloadLater = () => {
    let held = false;
    addEventListener("pointerdown", () => (held = true));
    addEventListener("pointerup", () => (held = false));
    setInterval(() => held || document.hidden || location.reload(), data.reload * 1000);
  };

  if (charts) {
    restore();
    data.charts.forEach(addPlot);
    addRuns();
    showState();
    form.addEventListener("input", changed);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.reset.addEventListener("click", () => zoom(null));
    dark.addEventListener("change", drawAll);
  }
  swatches();
  drawAll();
  if (data.reload) reloadLater();
  document.documentElement.dataset.drawn = plots.length;
})();
