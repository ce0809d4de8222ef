// What happened lately: rates and latencies of the last seconds, from counters that only grow, and the points of the
// charts, which the server keeps.

// 64-bit numbers come as text, and so does Infinity.
export const number = (value) => value === undefined || value === null ? 0 : Number(value);

const LONG = 10;  // seconds over which the figures in tables are taken

const UNARY = ['EmbeddingService/Lookup', 'EmbeddingService/ApplyGradients'];

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

  group(group) {
    const before = this.before.groups.find((other) => other.model === group.model && other.group === group.group);
    return {updates: this.rate(group.updates, before?.updates), waiting: this.rate(group.wait_seconds, before?.wait_seconds)};
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
  constructor(keepSeconds) {
    this.keepSeconds = keepSeconds;
    this.points = [];   // what the charts show: {time, values: Map}, oldest first
    this.unary = 0;     // calls of the methods that the chart of latencies shows, since the coordinators were started
    this.batches = 0;   // of all stacks, on streams or not
    this.restart();
  }

  // The server counts anew. What came before stays in the charts.
  restart() {
    this.answers = [];  // of the last seconds, oldest first
    this.recent = null;  // Interval over LONG seconds, or as far back as there is
    this.shardRates = [];
  }

  // Whether points have come between the last known one and those that an answer brings.
  misses(status) {
    return this.points.length === 0 || (status.recent.points[0]?.[0] ?? 0) > this.points.at(-1).time + 2000;
  }

  // Adds points as the server gives them: {keys, points: [[time, value or null, ...], ...]}.
  addPoints({keys, points}) {
    const end = this.points.at(-1)?.time ?? 0;
    for (const [time, ...values] of points) {
      if (time <= end) continue;
      this.points.push({time, values: new Map(keys.map((key, i) => [key, values[i]]).filter(([, value]) => value !== null))});
    }
    const last = this.points.at(-1)?.time ?? 0;
    while (this.points.length && this.points[0].time < last - this.keepSeconds * 1000) this.points.shift();
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
    }
    this.unary = stats.methods.filter((one) => UNARY.includes(one.method)).reduce((sum, one) => sum + number(one.seconds.count), 0);
    this.batches = stats.stacks.reduce((sum, stack) => sum + number(stack.batches), 0);
    this.addPoints(status.recent);
    return true;
  }

  latest(key) {
    return this.points.at(-1)?.values.get(key) ?? null;
  }
}
