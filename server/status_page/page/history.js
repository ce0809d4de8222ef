// From counters that only grow to what happened lately: rates, latencies, shares.

// 64-bit numbers come as text, and so does Infinity.
export const number = (value) => value === undefined || value === null ? 0 : Number(value);

const SHORT = 2;   // seconds over which the charts' rates are taken
const LONG = 10;   // the same for latencies and the figures in tables

const LOOKUP = 'EmbeddingService/Lookup';
const APPLY = 'EmbeddingService/ApplyGradients';

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

  calls(method, code) {
    return this.rate(this.methodsNow.get(method)?.codes?.[code], this.methodsBefore.get(method)?.codes?.[code]);
  }

  // Each lookup is a batch of every stack of its model, on a stream or not.
  lookups() {
    const before = new Map(this.before.stacks.map((stack) => [`${stack.model}/${stack.stack}`, stack.batches]));
    const ofModel = new Map();
    for (const stack of this.now.stacks) {
      const rate = this.rate(stack.batches, before.get(`${stack.model}/${stack.stack}`));
      ofModel.set(stack.model, Math.max(rate, ofModel.get(stack.model) ?? 0));
    }
    return [...ofModel.values()].reduce((a, b) => a + b, 0);
  }

  group(group) {
    const before = this.before.groups.find((other) => other.model === group.model && other.group === group.group);
    return {updates: this.rate(group.updates, before?.updates), waiting: this.rate(group.wait_seconds, before?.wait_seconds)};
  }

  updates() {
    return this.now.groups.reduce((sum, group) => sum + this.group(group).updates, this.calls(APPLY, 'OK'));
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

  bytes(field) {
    let sum = 0;
    for (const [name, method] of this.methodsNow) {
      if (name.startsWith('EmbeddingService/')) sum += this.rate(method[field], this.methodsBefore.get(name)?.[field]);
    }
    return sum;
  }

  errors() {
    const codes = new Map();
    for (const [name, method] of this.methodsNow) {
      for (const [code, calls] of Object.entries(method.codes)) {
        if (code === 'OK') continue;
        const rate = this.rate(calls, this.methodsBefore.get(name)?.codes?.[code]);
        codes.set(code, (codes.get(code) ?? 0) + rate);
      }
    }
    return codes;
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
  constructor(keepSeconds) {
    this.keepSeconds = keepSeconds;
    this.clear();
  }

  clear() {
    this.answers = [];  // of the last seconds, oldest first
    this.points = [];   // what the charts show: {time, values: Map}, oldest first
    this.recent = null;  // Interval over LONG seconds, or as far back as there is
    this.shardRates = [];
  }

  // Adds an answer of the server; false if it is the same as the last one.
  add(stats) {
    const last = this.answers.at(-1);
    const time = number(stats.time_ms);
    if (last && number(last.time_ms) === time) return false;
    if (last && (number(stats.uptime_ms) < number(last.uptime_ms) || time < number(last.time_ms))) this.restart();
    this.answers.push(stats);
    while (this.answers.length > 2 && number(this.answers[1].time_ms) <= time - LONG * 1000) this.answers.shift();
    if (this.answers.length > 1) this.derive(time);
    while (this.points.length && this.points[0].time < time - this.keepSeconds * 1000) this.points.shift();
    return true;
  }

  // The server began to count anew: what came before stays in the charts, with a gap.
  restart() {
    this.answers = [];
    this.recent = null;
    this.shardRates = [];
    const end = this.points.at(-1);
    if (end) this.points.push({time: end.time + 1, values: new Map()});
  }

  since(secondsBack) {
    const now = this.answers.at(-1);
    const start = number(now.time_ms) - secondsBack * 1000;
    let before = this.answers[0];
    for (const answer of this.answers) {
      if (number(answer.time_ms) <= start) before = answer;
    }
    return new Interval(before, now);
  }

  derive(time) {
    const fast = this.since(SHORT);
    const slow = this.since(LONG);
    const shards = fast.shards();
    const sum = (field) => shards.reduce((total, shard) => total + (shard?.[field] ?? 0), 0);
    const values = new Map([
      ['lookups', fast.lookups()], ['updates', fast.updates()],
      ['gathered', sum('gathered')], ['updated', sum('updated')],
      ['received', fast.bytes('request_bytes')], ['sent', fast.bytes('response_bytes')],
      ['lookup50', slow.quantile(0.5, LOOKUP)], ['lookup99', slow.quantile(0.99, LOOKUP)],
      ['apply50', slow.quantile(0.5, APPLY)], ['apply99', slow.quantile(0.99, APPLY)],
    ]);
    let errors = 0;
    for (const [code, rate] of fast.errors()) {
      values.set(`error ${code}`, rate);
      errors += rate;
    }
    values.set('errors', errors);
    this.points.push({time, values});
    this.recent = slow;
    this.shardRates = slow.shards();
  }

  latest(key) {
    return this.points.at(-1)?.values.get(key) ?? null;
  }
}
