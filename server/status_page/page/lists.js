// Hot rows, training groups, and methods, as tables.

import {byId, element, makeTable, setText, updateTable} from './dom.js';
import {bytes, bytesPerSecond, count, exact, percent, perSecond, seconds} from './format.js';
import {number} from './history.js';

const HOT_ROWS = 12;

// A table under an element, or a sentence while there is nothing to list.
class List {
  constructor(id, caption, empty, columns) {
    this.table = makeTable(caption, columns);
    this.empty = element('p', {class: 'nothing', text: empty});
    byId(id).append(this.table, this.empty);
  }

  update(rows) {
    this.table.hidden = rows.length === 0;
    this.empty.hidden = rows.length > 0;
    updateTable(this.table, rows);
  }
}

// Calls so far. A stream counts when it is over, whatever has come on it.
function ended(method) {
  const calls = exact(number(method.seconds.count));
  return method.method.endsWith('/Train') ? `${calls} ended` : calls;
}

export class Lists {
  constructor() {
    this.hot = new List('hot', 'Hot rows', 'No lookups yet.', [{title: 'Table'}, {title: 'Id', numeric: true},
      {title: 'Shard', numeric: true}, {title: 'Lookups', numeric: true}, {title: 'Share of the shard', numeric: true}]);
    this.groups = new List('groups', 'Training groups', 'No training group on this coordinator.', [{title: 'Group'},
      {title: 'Updates', numeric: true}, {title: 'In all', numeric: true}, {title: 'Ranks waiting', numeric: true},
      {title: 'Last to come'}, {title: 'Failed', numeric: true}]);
    this.methods = new List('methods', 'Methods', 'No call yet.', [{title: 'Method'}, {title: 'Calls', numeric: true},
      {title: 'In all', numeric: true}, {title: 'p50', numeric: true}, {title: 'p99', numeric: true},
      {title: 'In', numeric: true}, {title: 'Out', numeric: true}, {title: 'Errors'}]);
  }

  update(stats, history) {
    this.updateHot(stats, history);
    if (!history.recent) return;
    this.updateGroups(stats, history.recent);
    this.updateMethods(stats, history.recent);
  }

  updateHot(stats, history) {
    setText(this.hot.empty, history.batches > 0 ? 'No row stands out yet: few lookups are sampled.' : 'No lookups yet.');
    const rows = stats.shards.flatMap((shard) => (shard.hot_rows ?? []).map((row) => ({
      ...row, shard: number(shard.index), lookups: number(row.lookups),
      share: number(row.lookups) / Math.max(1, number(row.table_lookups)),
    })));
    rows.sort((a, b) => b.lookups - a.lookups);
    this.hot.update(rows.slice(0, HOT_ROWS).map((row) => ({
      key: `${row.shard}/${row.model}/${row.table}/${row.id}`,
      cells: [`${row.model} / ${row.table}`, exact(number(row.id)), String(row.shard), `≈${count(row.lookups)}`,
        {text: percent(row.share), share: row.share}],
    })));
  }

  updateGroups(stats, recent) {
    this.groups.update(stats.groups.map((group) => {
      const now = recent.group(group);
      const last = Object.entries(group.last_arrivals).map(([rank, times]) => [rank, number(times)]).sort((a, b) => b[1] - a[1]);
      const sum = last.reduce((total, [, times]) => total + times, 0);
      return {
        key: `${group.model}/${group.group}`,
        cells: [`${group.model} / ${group.group}`, perSecond(now.updates), exact(number(group.updates)),
          now.waiting.toFixed(2), last.slice(0, 3).map(([rank, times]) => `rank ${rank}: ${percent(times / sum)}`).join(', '),
          exact(number(group.failures))],
      };
    }));
  }

  updateMethods(stats, recent) {
    this.methods.update(stats.methods.map((method) => {
      const before = recent.methodsBefore.get(method.method);
      const failed = Object.entries(method.codes).filter(([code]) => code !== 'OK');
      return {
        key: method.method,
        class: failed.length ? 'failed' : null,
        cells: [method.method, perSecond(recent.rate(method.seconds.count, before?.seconds.count)),
          ended(method), seconds(recent.quantile(0.5, method.method)),
          seconds(recent.quantile(0.99, method.method)), bytes(number(method.request_bytes)), bytes(number(method.response_bytes)),
          failed.map(([code, calls]) => `${code} ${exact(number(calls))}`).join(', ')],
      };
    }));
  }
}
