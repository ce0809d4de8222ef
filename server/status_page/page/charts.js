// Line charts over time, drawn as SVG. Each can be read with the pointer, with the arrow keys, and as a table.

import {element, makeTable, setAttribute, setText, svg, updateTable} from './dom.js';

const HEIGHT = 168;
const MARGIN = {right: 10, top: 8, bottom: 22};
const LEAST_LEFT = 30;  // more where the labels of the axis need it
const TABLE_ROWS = 12;
const SHORTEST = 60;  // seconds that are shown, even if less is known

// Ticks from 0 to the first one that is not below `largest`: at multiples of 1, 2 or 5 times a power of ten or, for bytes,
// of a power of two.
export function ticks(largest, binary) {
  const goal = (largest > 0 ? largest : 1) / 3;
  const power = 10 ** Math.floor(Math.log10(goal));
  const step = binary ? 2 ** Math.max(0, Math.ceil(Math.log2(goal * 0.999)))
    : [1, 2, 5, 10].map((one) => one * power).find((one) => one >= goal * 0.999);
  const all = [];
  for (let i = 0; i < 2 || all.at(-1) < largest * 0.999; ++i) all.push(i * step);
  return all;
}

// "50.0 ms" is "50 ms" beside an axis.
const plain = (text) => text.replace(/\.(\d*?)0+(?!\d)/, (_, digits) => digits ? `.${digits}` : '');

function ago(ms) {
  const seconds = Math.round(ms / 1000);
  if (seconds < 1) return 'now';
  return seconds < 120 ? `${seconds} s ago` : `${(seconds / 60).toFixed(1)} min ago`;
}

// Lines through what is known, with gaps where it is not; `ground`: down to there and back, for an area.
function path(points, x, y, ground = null) {
  let text = '';
  let run = [];
  const end = () => {
    if (run.length > 0) {
      text += `M${run.map((point) => `${x(point.time).toFixed(1)} ${y(point.value).toFixed(1)}`).join('L')}`;
      if (ground !== null) text += `V${ground}H${x(run[0].time).toFixed(1)}Z`;
    }
    run = [];
  };
  for (const point of points) {
    if (point.value === null) end();
    else run.push(point);
  }
  end();
  return text;
}

export class Chart {
  // title; format(value); series(history): list of {key, label, style}, most important first; empty(history): what to say
  // when nothing is known; binary: values are bytes. `style` is a class of page.css.
  constructor({title, format, series, empty, binary = false}) {
    Object.assign(this, {title, format, series, empty, binary});
    this.points = [];
    this.shown = [];
    this.width = 400;
    this.left = LEAST_LEFT;
    this.blank = '';
    this.cursor = null;  // time of the point that is read out
    this.build();
  }

  build() {
    this.legend = element('ul', {class: 'legend'});
    this.grid = svg('g', {class: 'grid'});
    this.lines = svg('g', {class: 'lines'});
    this.rule = svg('line', {class: 'rule', y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: 'hidden'});
    this.dots = svg('g');
    this.picture = svg('svg', {height: HEIGHT, role: 'img', tabindex: '0', class: 'plot'},
      this.grid, this.lines, this.rule, this.dots);
    this.tip = element('div', {class: 'tip', 'aria-hidden': 'true', hidden: true});
    this.spoken = element('p', {class: 'hidden', 'aria-live': 'polite'});
    this.nothing = element('p', {class: 'nothing', hidden: true});
    this.details = element('details', {class: 'data', ontoggle: () => this.drawTable()},
      element('summary', {}, 'Data', element('span', {class: 'hidden', text: ` of ${this.title}`})));
    this.frame = element('div', {class: 'frame'}, this.picture, this.nothing, this.tip);
    this.node = element('figure', {class: 'chart'},
      element('figcaption', {}, element('h3', {text: this.title}), this.legend), this.frame, this.details, this.spoken);
    this.frame.style.minHeight = `${HEIGHT}px`;
    this.picture.addEventListener('pointermove', (event) => this.point(event));
    this.picture.addEventListener('pointerleave', () => this.moveCursor(null));
    this.picture.addEventListener('blur', () => this.moveCursor(null));
    this.picture.addEventListener('keydown', (event) => this.key(event));
    new ResizeObserver(([entry]) => {
      this.width = Math.max(200, entry.contentRect.width);
      this.draw();
    }).observe(this.frame);
  }

  // Shows the last `seconds` of the history, or all of it while there is less.
  update(history, seconds) {
    const end = history.points.at(-1)?.time ?? 0;
    const known = Math.ceil((end - (history.points[0]?.time ?? end)) / 1000 / SHORTEST) * SHORTEST;
    this.end = end;
    this.blank = this.empty(history);
    this.span = Math.min(seconds, Math.max(SHORTEST, known)) * 1000;
    this.points = history.points.filter((point) => point.time >= end - this.span);
    this.shown = this.series(history).map((series) => ({
      ...series,
      points: this.points.map((point) => ({time: point.time, value: point.values.get(series.key) ?? null})),
    }));
    this.draw();
  }

  x(time) {
    return this.width - MARGIN.right - (this.end - time) / this.span * (this.width - this.left - MARGIN.right);
  }

  y(value) {
    return HEIGHT - MARGIN.bottom - value / this.top * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  values() {
    return this.shown.flatMap((series) => series.points).map((point) => point.value).filter((value) => value !== null);
  }

  draw() {
    const values = this.values();
    this.nothing.hidden = values.length > 0;
    setText(this.nothing, this.blank);
    this.picture.classList.toggle('blank', values.length === 0);
    setAttribute(this.picture, 'viewBox', `0 0 ${this.width} ${HEIGHT}`);
    setAttribute(this.picture, 'width', this.width);
    const marks = ticks(values.length ? Math.max(...values) : 0, this.binary);
    this.top = marks.at(-1);
    this.drawGrid(values.length ? marks : [0]);
    this.drawLines();
    this.drawLegend();
    this.drawTable();
    this.drawCursor(false);
    setAttribute(this.picture, 'aria-label', this.summary(values));
  }

  drawGrid(marks) {
    const right = this.width - MARGIN.right;
    const labels = marks.map((mark) => svg('text', {y: this.y(mark) + 4, 'text-anchor': 'end', text: plain(this.format(mark))}));
    this.grid.replaceChildren(...labels);
    this.left = Math.max(LEAST_LEFT, ...labels.map((label) => Math.ceil(label.getComputedTextLength()) + 10));
    for (const label of labels) setAttribute(label, 'x', this.left - 8);
    const lines = marks.map((mark) => svg('line',
      {x1: this.left, x2: right, y1: this.y(mark), y2: this.y(mark), class: mark === 0 ? 'base' : null}));
    const minutes = this.span >= 120000;
    const step = minutes ? 60000 * Math.ceil(this.span / 60000 / (this.width < 360 ? 2 : 5)) : this.width < 360 ? 30000 : 15000;
    const columns = [];
    for (let back = 0; back <= this.span; back += step) {
      const label = back === 0 ? 'now' : `−${minutes ? `${back / 60000} min` : `${back / 1000} s`}`;
      const anchor = back === 0 ? 'end' : 'middle';
      columns.push(svg('text', {x: this.x(this.end - back), y: HEIGHT - 6, 'text-anchor': anchor, text: label}));
    }
    this.grid.replaceChildren(...lines, ...labels, ...columns);
  }

  drawLines() {
    const x = (time) => this.x(time);
    const y = (value) => this.y(value);
    // The most important one comes last, on top.
    const lines = [...this.shown].reverse().map(
      (series) => svg('path', {class: `line ${series.style}`, d: path(series.points, x, y)}));
    const first = this.shown[0];
    const area = first ? [svg('path', {class: `area ${first.style}`, d: path(first.points, x, y, this.y(0))})] : [];
    this.lines.replaceChildren(...area, ...lines);
  }

  drawLegend() {
    const at = this.cursorIndex();
    while (this.legend.children.length > this.shown.length) this.legend.lastChild.remove();
    this.shown.forEach((series, i) => {
      if (!this.legend.children[i]) {
        this.legend.append(element('li', {}, svg('svg', {class: 'key', width: 18, height: 8, 'aria-hidden': 'true'},
          svg('path', {d: 'M0 4L18 4'})), element('span'), element('b')));
      }
      const [key, label, value] = this.legend.children[i].children;
      setAttribute(key.firstChild, 'class', `line ${series.style}`);
      setText(label, series.label);
      setText(value, this.format((at === null ? series.points.at(-1) : series.points[at])?.value ?? null));
    });
  }

  drawTable() {
    if (!this.details.open) return;
    if (!this.table || this.tableColumns !== this.shown.length) {
      this.table?.remove();
      this.tableColumns = this.shown.length;
      this.table = makeTable(this.title, [{title: 'When'},
        ...this.shown.map((series) => ({title: series.label, numeric: true}))]);
      this.details.append(this.table);
    }
    // The latest one and what comes at even distances before it.
    const every = Math.max(1, Math.floor(this.points.length / TABLE_ROWS));
    const rows = [];
    for (let i = this.points.length - 1; i >= 0 && rows.length < TABLE_ROWS; i -= every) {
      rows.push({key: rows.length, cells: [ago(this.end - this.points[i].time),
        ...this.shown.map((series) => this.format(series.points[i].value))]});
    }
    updateTable(this.table, rows);
  }

  summary(values) {
    if (values.length === 0) return `${this.title}: ${this.blank}`;
    const now = this.shown.map((series) => `${series.label} ${this.format(series.points.at(-1)?.value ?? null)}`);
    return `${this.title}. Now: ${now.join(', ')}. Highest shown: ${this.format(Math.max(...values))}.`;
  }

  // Reading out.

  cursorIndex() {
    if (this.cursor === null || this.points.length === 0) return null;
    let best = 0;
    this.points.forEach((point, i) => {
      if (Math.abs(point.time - this.cursor) < Math.abs(this.points[best].time - this.cursor)) best = i;
    });
    return best;
  }

  point(event) {
    const box = this.picture.getBoundingClientRect();
    const back = (this.width - MARGIN.right - (event.clientX - box.left)) / (this.width - this.left - MARGIN.right);
    this.moveCursor(this.end - back * this.span);
  }

  key(event) {
    const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity}[event.key];
    if (event.key === 'Escape') this.moveCursor(null);
    if (step === undefined || this.points.length === 0) return;
    event.preventDefault();
    const last = this.points.length - 1;
    const from = this.cursorIndex() ?? last + (step < 0 ? 1 : 0);
    this.moveCursor(this.points[Math.min(last, Math.max(0, from + step))].time, true);
  }

  moveCursor(time, aloud = false) {
    this.cursor = time;
    this.drawCursor(aloud);
    this.drawLegend();
  }

  drawCursor(aloud) {
    const at = this.cursorIndex();
    const hide = at === null || this.values().length === 0;
    setAttribute(this.rule, 'visibility', hide ? 'hidden' : 'visible');
    this.tip.hidden = hide;
    if (hide) {
      this.dots.replaceChildren();
      return;
    }
    const x = this.x(this.points[at].time);
    setAttribute(this.rule, 'x1', x);
    setAttribute(this.rule, 'x2', x);
    const here = this.shown.map((series) => ({...series, value: series.points[at].value}));
    this.dots.replaceChildren(...here.filter((series) => series.value !== null).map(
      (series) => svg('circle', {class: `dot ${series.style}`, cx: x, cy: this.y(series.value), r: 3})));
    const when = ago(this.end - this.points[at].time);
    this.tip.replaceChildren(element('p', {text: when}), ...here.map((series) => element('p', {},
      element('span', {text: series.label}), element('b', {text: this.format(series.value)}))));
    this.tip.classList.toggle('left', x > this.width / 2);
    this.tip.style.setProperty('--x', `${x}px`);
    if (aloud) setText(this.spoken, `${when}: ${here.map((one) => `${one.label} ${this.format(one.value)}`).join(', ')}`);
  }
}
