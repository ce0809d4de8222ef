// What happened lately: rates and latencies of the last seconds, and the points of the charts, from counters that only
// grow. They are kept as long as the tab is open, also when the page is loaded anew.

// 64-bit numbers come as text, and so does Infinity.
export const number = (value) => value === undefined || value === null ? 0 : Number(value);

const LONG = 10;  // seconds over which latencies and the figures in tables are taken
const SHORT = 2;  // and the rates of the charts
const FINE = 300;  // seconds for which all points are kept; older ones COARSE seconds apart
const COARSE = 5;

const UNARY = ['EmbeddingService/Lookup', 'EmbeddingService/ApplyGradients'];
const LATENCIES = [['lookup50', UNARY[0], 0.5], ['lookup99', UNARY[0], 0.99], ['apply50', UNARY[1], 0.5], ['apply99', UNARY[1], 0.99]];

// The value below which a share q of the observations lies that came between two distributions; null if none came.
// Inside a bucket they are taken to be spread evenly.
export function quantile(q, now, before) {
  const earlier = new Map((before?.buckets ?? []).map((bucket) => [number(bucket.upper), number(bucket.count)]));
  const total = number(now.count) - number(before?.count);
  if (total <= 0) return null;
  let lower = 0;
  let below = 0;
  for (const bucket of now.buckets) {
    const upper = number(bucket.upper);
    const upTo = number(bucket.count) - (earlier.get(upper) ?? 0);
    if (upTo >= q * total && upTo > below) {
      if (!Number.isFinite(upper)) return lower;
      return lower + (upper - lower) * (q * total - below) / (upTo - below);
    }
    lower = upper;
    below = upTo;
  }
  return lower;
}

const byName = (list, name) => new Map(list.map((entry) => [entry[name], entry]));

// Lookups of the batches that `now` counts and `before` does not: each is a batch of every stack of its model, on a stream or
// not.
export function lookupsBetween(now, before) {
  const earlier = new Map(before.map((stack) => [`${stack.model}/${stack.stack}`, number(stack.batches)]));
  const ofModel = new Map();
  for (const stack of now) {
    const more = number(stack.batches) - (earlier.get(`${stack.model}/${stack.stack}`) ?? 0);
    ofModel.set(stack.model, Math.max(ofModel.get(stack.model) ?? 0, more));
  }
  return [...ofModel.values()].reduce((sum, one) => sum + one, 0);
}

// Two answers of the same server and what lies between them.
class Interval {
  constructor(before, now) {
    this.before = before;
    this.now = now;
    this.seconds = (number(now.time_ms) - number(before.time_ms)) / 1000;
    this.methodsBefore = byName(before.methods, 'method');
    this.methodsNow = byName(now.methods, 'method');
  }

  rate(now, before) {
    return Math.max(0, number(now) - number(before)) / this.seconds;
  }

  quantile(q, method) {
    const now = this.methodsNow.get(method);
    return now ? quantile(q, now.seconds, this.methodsBefore.get(method)?.seconds) : null;
  }

  group(group) {
    const before = this.before.groups.find((other) => other.model === group.model && other.group === group.group);
    return {updates: this.rate(group.updates, before?.updates), waiting: this.rate(group.wait_seconds, before?.wait_seconds)};
  }

  // What the charts show, but for latencies: a rate for each key.
  values() {
    const values = new Map([['received', 0], ['sent', 0], ['errors', 0], ['gathered', 0], ['updated', 0]]);
    const add = (key, rate) => values.set(key, (values.get(key) ?? 0) + rate);
    values.set('lookups', lookupsBetween(this.now.stacks, this.before.stacks) / this.seconds);
    const applied = (methods) => methods.get('EmbeddingService/ApplyGradients')?.codes?.OK;
    values.set('updates', this.rate(applied(this.methodsNow), applied(this.methodsBefore)));
    for (const group of this.now.groups) add('updates', this.group(group).updates);
    for (const [name, method] of this.methodsNow) {
      const old = this.methodsBefore.get(name);
      if (name.startsWith('EmbeddingService/')) {
        add('received', this.rate(method.request_bytes, old?.request_bytes));
        add('sent', this.rate(method.response_bytes, old?.response_bytes));
      }
      for (const [code, calls] of Object.entries(method.codes)) {
        const rate = code === 'OK' ? 0 : this.rate(calls, old?.codes?.[code]);
        if (rate === 0) continue;
        add('errors', rate);
        add(`error ${code}`, rate);
      }
    }
    for (const shard of this.shards()) {
      add('gathered', shard?.gathered ?? 0);
      add('updated', shard?.updated ?? 0);
    }
    return values;
  }

  // By shard number: rows per second, in all and of each partition; null where a shard was not there all the time.
  shards() {
    const before = new Map(this.before.shards.map((shard) => [number(shard.index), shard]));
    return this.now.shards.map((shard) => {
      const old = before.get(number(shard.index));
      if (!shard.reachable || !old?.reachable || old.incarnation !== shard.incarnation) return null;
      const rates = (now, then) => ({
        gathered: this.rate(now.rows_gathered, then?.rows_gathered),
        updated: this.rate(now.rows_updated, then?.rows_updated),
      });
      return {...rates(shard, old), partitions: shard.partitions.map((one, i) => rates(one, old.partitions[i]))};
    });
  }

  // The mean time of each stage of a step; null if none came.
  stages() {
    const before = byName(this.before.stages, 'stage');
    return this.now.stages.map((stage) => {
      const old = before.get(stage.stage)?.seconds;
      const times = number(stage.seconds.count) - number(old?.count);
      const spent = number(stage.seconds.sum) - number(old?.sum);
      return {stage: stage.stage, mean: times > 0 ? spent / times : null};
    });
  }
}

export class History {
  // `points`: of an earlier one.
  constructor(keepSeconds, points = []) {
    this.keepSeconds = keepSeconds;
    this.points = points;   // what the charts show: {time, values: Map}, oldest first
    this.unary = 0;     // calls of the methods that the chart of latencies shows, since the coordinators were started
    this.batches = 0;   // of all stacks, on streams or not
    this.coordinators = new Map();  // by name: their answers of the last seconds
    this.restart();
  }

  // The server counts anew. What came before stays in the charts.
  restart() {
    this.answers = [];  // of the last seconds, oldest first
    this.recent = null;  // Interval over LONG seconds, or as far back as there is
    this.shardRates = [];
  }

  addPoint(time, values) {
    const last = this.points.at(-1)?.time ?? 0;
    if (time === last) return;  // known since before a reload
    if (time < last) this.points = [];  // the clock was set back
    this.points.push({time, values});
    // The newest of those that are no longer among the fine ones, if it is too close to the one before.
    const old = this.points.findLastIndex((point) => point.time < time - FINE * 1000);
    if (old > 0 && this.points[old].time < this.points[old - 1].time + COARSE * 1000) this.points.splice(old, 1);
    while (this.points[0].time < time - this.keepSeconds * 1000) this.points.shift();
  }

  // Adds an answer of the server; false if it is the same as the last one.
  add(status) {
    const stats = status.stats;
    const last = this.answers.at(-1);
    const time = number(stats.time_ms);
    if (last && number(last.time_ms) === time) return false;
    const anew = last && (number(stats.uptime_ms) < number(last.uptime_ms) || time < number(last.time_ms));
    if (anew || status.epoch !== this.epoch) this.restart();
    this.epoch = status.epoch;
    this.answers.push(stats);
    while (this.answers.length > 2 && number(this.answers[1].time_ms) <= time - LONG * 1000) this.answers.shift();
    if (this.answers.length > 1) {
      this.recent = new Interval(this.answers[0], stats);
      this.shardRates = this.recent.shards();
      const before = this.answers.findLast((answer) => number(answer.time_ms) <= time - SHORT * 1000) ?? this.answers[0];
      const values = new Interval(before, stats).values();
      for (const [key, method, q] of LATENCIES) {
        const value = this.recent.quantile(q, method);
        if (value !== null) values.set(key, value);
      }
      this.addPoint(time, values);
    } else {
      this.addPoint(time, new Map());  // a gap
    }
    this.unary = stats.methods.filter((one) => UNARY.includes(one.method)).reduce((sum, one) => sum + number(one.seconds.count), 0);
    this.batches = stats.stacks.reduce((sum, stack) => sum + number(stack.batches), 0);
    return true;
  }

  // Per second, of one of the coordinators of the last two answers or more; 0 if it has not answered twice.
  lookupsOf({name, stats, reachable}) {
    if (!reachable) {
      this.coordinators.delete(name);
      return 0;
    }
    const known = this.coordinators.get(name) ?? [];
    const last = known.at(-1);
    const time = number(stats.time_ms);
    if (last && (number(stats.uptime_ms) < number(last.uptime_ms) || time < number(last.time_ms))) known.length = 0;
    if (known.length === 0 || time > number(last.time_ms)) known.push(stats);
    while (known.length > 2 && number(known[1].time_ms) <= time - LONG * 1000) known.shift();
    this.coordinators.set(name, known);
    const seconds = (time - number(known[0].time_ms)) / 1000;
    return seconds > 0 ? lookupsBetween(stats.stacks, known[0].stacks) / seconds : 0;
  }

  latest(key) {
    return this.points.at(-1)?.values.get(key) ?? null;
  }
}
