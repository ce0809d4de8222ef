// Asks the coordinator once a second and hands the answer to the parts of the page.

import {Chart} from './charts.js';
import {updateCoordinators, updateShards, updateTiles} from './cluster.js';
import {byId, setText} from './dom.js';
import {bytesPerSecond, count, duration, exact, seconds} from './format.js';
import {History, number} from './history.js';
import {Lists} from './lists.js';
import {Stages} from './stages.js';
import {updateModels} from './tables.js';

const EVERY_MS = 1000;
const HIDDEN_EVERY_MS = 5000;
const PATIENCE_MS = 5000;
const KEEP_SECONDS = 3600;
const POINTS = 'points';  // where the tab keeps them

const perSecond = (value) => value === null ? '–' : count(value);
const fixed = (...series) => () => series.map(([key, label, style]) => ({key, label, style}));

const ERROR_STYLES = ['bad', 'bad dashed', 'bad dotted', 'faint', 'faint dashed'];

function errorSeries(history) {
  const codes = new Set(history.points.flatMap((point) => [...point.values.keys()].filter((key) => key.startsWith('error '))));
  if (codes.size === 0) return [{key: 'errors', label: 'all codes', style: 'bad'}];
  return [...codes].sort().map((key, i) => ({key, label: key.slice('error '.length), style: ERROR_STYLES[i % ERROR_STYLES.length]}));
}

// What the chart of latencies says while it has none to show.
function noLatency(history) {
  if (history.unary > 0) return `No Lookup or ApplyGradients call in this time; ${exact(history.unary)} since the start.`;
  if (history.batches > 0) return 'Every step so far came on a stream: see the mean time of each stage.';
  return 'No Lookup or ApplyGradients call yet.';
}

const soon = () => 'The first figures come within seconds.';

// Lookups and what goes out in the accent, updates and what comes in beside it, errors in red.
const CHARTS = [
  {title: 'Steps per second', format: perSecond, empty: soon,
    series: fixed(['lookups', 'lookups', 'main'], ['updates', 'updates', 'other'])},
  {title: 'Latency', format: seconds, empty: noLatency,
    series: fixed(['lookup99', 'Lookup p99', 'main'], ['lookup50', 'p50', 'main dashed'],
      ['apply99', 'ApplyGradients p99', 'other'], ['apply50', 'p50', 'other dashed'])},
  {title: 'Rows per second', format: perSecond, empty: soon,
    series: fixed(['gathered', 'gathered', 'main'], ['updated', 'updated', 'other'])},
  {title: 'Bytes per second', format: bytesPerSecond, binary: true, empty: soon,
    series: fixed(['sent', 'out', 'main'], ['received', 'in', 'other'])},
  {title: 'Errors per second', format: perSecond, empty: soon, series: errorSeries},
];

class Page {
  constructor() {
    this.history = new History(KEEP_SECONDS, storedPoints());
    addEventListener('pagehide', () => sessionValue(POINTS, storePoints(this.history.points)));
    this.charts = CHARTS.map((chart) => new Chart(chart));
    this.stages = new Stages();
    byId('charts').append(...this.charts.map((chart) => chart.node), this.stages.node);
    this.lists = new Lists();
    this.models = [];
    this.modelsKnown = '';
    this.lost = 0;  // failures in a row
    this.lastSeen = null;
    this.token = sessionValue('token');
    this.setUpControls();
  }

  setUpControls() {
    byId('window').addEventListener('change', () => this.drawCharts());
    byId('login').addEventListener('submit', (event) => {
      event.preventDefault();
      this.token = byId('token').value;
      sessionValue('token', this.token);
      this.askSoon(0);
    });
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) this.askSoon(0);
    });
  }

  askSoon(ms) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), ms);
  }

  async get(path) {
    const headers = this.token ? {Authorization: `Bearer ${this.token}`} : {};
    const answer = await fetch(path, {headers, cache: 'no-store', signal: AbortSignal.timeout(PATIENCE_MS)});
    if (answer.status === 401 || answer.status === 403) throw Object.assign(new Error(await answer.text()), {refused: true});
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  async ask() {
    clearTimeout(this.timer);
    if (this.asking) return;
    this.asking = true;
    try {
      const status = await this.fetchAll();
      if (status) this.show(status);
    } finally {
      this.asking = false;
      this.askSoon(document.hidden ? HIDDEN_EVERY_MS : EVERY_MS);
    }
  }

  // Null if the coordinator does not answer, or not to us.
  async fetchAll() {
    try {
      const status = await this.get('/status.json');
      const known = JSON.stringify(status.models);
      if (known !== this.modelsKnown) {
        this.models = status.models.length ? (await this.get('/models.json')).models : [];
        // That answer may be older, or lack a model that could not be described in time: it is asked for again then.
        const key = (id, history, lost) => [id, history, lost].join();
        const found = new Set(this.models.map((one) => key(one.model_id, one.history, one.recovery || one.lost || '')));
        this.modelsKnown = status.models.every((one) => found.has(key(one.model_id, one.history, one.lost))) ? known : '';
      }
      return status;
    } catch (error) {
      this.disconnected(error);
      return null;
    }
  }

  show(status) {
    const stats = status.stats;
    this.stats = stats;
    this.connected();
    setText(byId('name'), status.name);
    document.title = `emberd ${status.name}`;
    setText(byId('version'), status.version);
    setText(byId('uptime'), `up ${duration(number(stats.uptime_ms))}`);
    if (!this.history.add(status)) return;
    updateTiles(stats, this.history);
    updateCoordinators(status.coordinators, this.history);
    updateShards(stats, this.history);
    updateModels(this.models, stats);
    this.lists.update(stats, this.history);
    this.stages.update(this.history);
    this.drawCharts();
  }

  drawCharts() {
    const seconds = Number(byId('window').value);
    for (const chart of this.charts) chart.update(this.history, seconds);
  }

  setState(text, kind) {
    setText(byId('state'), text);
    byId('state').className = `state ${kind}`;
  }

  connected() {
    this.lost = 0;
    this.lastSeen = Date.now();
    byId('login').hidden = true;
    byId('banner').hidden = true;
    document.body.classList.remove('stale');
    this.setState(this.stats.draining ? 'draining' : 'serving', this.stats.draining ? 'warn' : '');
  }

  disconnected(error) {
    if (error.refused) {
      this.setState('closed', 'bad');
      byId('banner').hidden = true;
      if (byId('login').hidden) {
        byId('login').hidden = false;
        byId('token').focus();
      }
      setText(byId('refusal'), this.token ? `Refused: ${error.message.trim()}` : '');
      return;
    }
    ++this.lost;
    this.setState('no connection', 'bad');
    document.body.classList.add('stale');
    byId('banner').hidden = false;
    // Once, not every second: a screen reader says each change aloud.
    if (this.lost === 1) {
      const since = this.lastSeen ? ` What you see is from ${new Date(this.lastSeen).toLocaleTimeString()}.` : '';
      setText(byId('banner'), `Connection lost, retrying.${since}`);
    }
  }
}

// Reads or writes what lasts as long as the tab; browsers may forbid it.
function sessionValue(name, value) {
  try {
    if (value === undefined) return sessionStorage.getItem(name) ?? '';
    sessionStorage.setItem(name, value);
  } catch {
    return '';
  }
  return value;
}

// The charts' points, kept while the page is loaded anew.
const storePoints = (points) => JSON.stringify(points.map(({time, values}) => [time, [...values]]));
function storedPoints() {
  try {
    const points = JSON.parse(sessionValue(POINTS) || '[]').map(([time, values]) => ({time, values: new Map(values)}));
    return points.filter(({time}) => time > Date.now() - KEEP_SECONDS * 1000);
  } catch {
    return [];
  }
}

const THEMES = ['system', 'light', 'dark'];

function setUpTheme() {
  const button = byId('theme');
  const stored = () => {
    try {
      return localStorage.getItem('theme');
    } catch {
      return null;
    }
  };
  const apply = (theme) => {
    if (theme === 'system') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    setText(button, `Theme: ${theme}`);
    button.dataset.theme = theme;
  };
  apply(THEMES.includes(stored()) ? stored() : 'system');
  button.addEventListener('click', () => {
    const next = THEMES[(THEMES.indexOf(button.dataset.theme) + 1) % THEMES.length];
    apply(next);
    try {
      localStorage.setItem('theme', next);
    } catch {
      // It holds until the page is closed.
    }
  });
}

setUpTheme();
new Page().askSoon(0);
