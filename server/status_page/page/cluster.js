// The figures of now, the coordinator, and a card for each shard.

import {byId, element, keyed, makeMeter, makeTable, setAttribute, setText, updateMeter, updateTable} from './dom.js';
import {bytes, bytesPerSecond, count, duration, exact, percent, perSecond, plural, seconds} from './format.js';
import {number} from './history.js';
import {makeMemoryTable, makeResident, memoryFacts, updateMemory} from './memory.js';

function imbalance(rates) {
  const partitions = rates.flatMap((shard) => shard ? shard.partitions.map((one) => one.gathered) : []);
  const sum = partitions.reduce((a, b) => a + b, 0);
  return sum > 0 ? Math.max(...partitions) / (sum / partitions.length) : null;
}

export function updateTiles(stats, history) {
  const latest = (key) => history.latest(key);
  const shards = stats.shards.filter((shard) => shard.reachable);
  const used = shards.reduce((sum, shard) => sum + number(shard.table_bytes), 0);
  const budget = shards.reduce((sum, shard) => sum + number(shard.table_budget_bytes), 0);
  const down = stats.shards.length - shards.length;
  const uneven = imbalance(history.shardRates);
  const tiles = [
    {label: 'Lookups', value: perSecond(latest('lookups')), note: `${perSecond(latest('updates'))} updates`},
    {label: 'Rows gathered', value: perSecond(latest('gathered')), note: `${perSecond(latest('updated'))} updated`},
    {label: 'Lookup p99', value: seconds(latest('lookup99')), note: `p50 ${seconds(latest('lookup50'))}`},
    {label: 'Bytes out', value: bytesPerSecond(latest('sent')), note: `${bytesPerSecond(latest('received'))} in`},
    {label: 'Errors', value: perSecond(latest('errors')), note: 'all methods', bad: latest('errors') > 0},
    {label: 'Shards', value: `${shards.length} of ${stats.shards.length}`,
      note: down > 0 ? `${down} out of reach` : 'all answer', bad: down > 0},
    {label: 'Table memory', value: bytes(used), note: budget > 0 ? `${percent(used / budget)} of ${bytes(budget)}` : 'no budget'},
    {label: 'Imbalance', value: uneven === null ? '–' : `${uneven.toFixed(2)}×`, note: 'busiest to mean'},
  ];
  const create = () => element('div', {class: 'tile'}, element('dt'), element('dd', {class: 'big'}), element('dd', {class: 'note'}));
  keyed(byId('tiles'), tiles, (tile) => tile.label, create, (node, tile) => {
    node.classList.toggle('bad', Boolean(tile.bad));
    setText(node.children[0], tile.label);
    setText(node.children[1], tile.value);
    setText(node.children[2], tile.note);
  });
}

const COORDINATOR_METERS = [
  ['Requests in flight', (stats) => [number(stats.in_flight_bytes), number(stats.in_flight_budget_bytes)]],
  ['Kept batches', (stats) => [number(stats.batch_bytes), number(stats.batch_budget_bytes)]],
];

function makeCoordinator() {
  const node = element('li', {class: 'coordinator'});
  Object.assign(node, {
    name: element('h3', {}, element('a', {rel: 'noreferrer'})),
    state: element('span', {class: 'state'}),
    address: element('p', {class: 'address'}),
    reason: element('p', {class: 'reason'}),
    meters: COORDINATOR_METERS.map(([label]) => makeMeter(label)),
    facts: element('p', {class: 'facts'}),
  });
  node.append(element('div', {class: 'coordinator-top'}, element('div', {class: 'shard-top'}, node.name, node.state), node.address),
    node.reason, ...node.meters, node.facts);
  return node;
}

function updateCoordinator(node, one, lookups, alone) {
  const stats = one.stats;
  const up = one.reachable;
  const link = node.name.firstChild;
  setText(link, alone ? 'This coordinator' : one.self ? `${one.name} (this one)` : one.name);
  setAttribute(link, 'href', one.self || !one.http_address ? null : `${location.protocol}//${one.http_address}/`);
  node.classList.toggle('down', !up);
  node.state.hidden = alone;
  setText(node.state, up ? stats.draining ? 'draining' : 'serving' : 'out of reach');
  node.state.classList.toggle('bad', !up);
  node.state.classList.toggle('warn', up && stats.draining);
  setText(node.address, one.address);
  node.reason.hidden = up;
  setText(node.reason, up ? '' : one.error || 'it does not answer');
  COORDINATOR_METERS.forEach(([, read], i) => {
    const [value, budget] = read(stats);
    node.meters[i].hidden = !up;
    updateMeter(node.meters[i], value, budget, `${bytes(value)} of ${bytes(budget)}`);
  });
  node.facts.hidden = !up;
  setText(node.facts, [`${perSecond(lookups)} lookups`,
    `${plural(stats.in_flight_requests, 'request')}, ${exact(stats.queued_requests)} queued`,
    plural(stats.train_streams, 'stream'), `${exact(stats.batches)} kept`].join(' · '));
}

// All of the cluster that are known here; the one that serves the page comes first.
export function updateCoordinators(coordinators, history) {
  const down = coordinators.filter((one) => !one.reachable);
  setText(byId('coordinators-note'), coordinators.length === 1 ? '' : down.length === 0
    ? `${plural(coordinators.length, 'coordinator')}; the figures of this page are of all of them`
    : `out of reach: ${down.map((one) => one.name).join(', ')}; the figures of this page are of the others`);
  keyed(byId('coordinators'), coordinators, (one) => one.name, makeCoordinator,
    (node, one) => updateCoordinator(node, one, history.lookupsOf(one), coordinators.length === 1));
}

function makeShard(shard) {
  const body = `shard-${number(shard.index)}-details`;
  const title = element('button', {type: 'button', class: 'opener', 'aria-expanded': 'false', 'aria-controls': body,
    text: `Shard ${number(shard.index)}`});
  const node = element('li', {class: 'shard'});
  Object.assign(node, {
    state: element('span', {class: 'state'}),
    address: element('p', {class: 'address'}),
    reason: element('p', {class: 'reason'}),
    cells: element('ol', {class: 'cells'}),
    memory: makeMeter('Tables'),
    resident: makeResident(),
    facts: element('dl', {class: 'facts'}),
    more: element('div', {id: body, class: 'more', hidden: true}),
    link: element('a', {rel: 'noreferrer'}),
    partitions: makeTable(`Partitions of shard ${number(shard.index)}`,
      [{title: 'Partition'}, {title: 'Gathered', numeric: true}, {title: 'Updated', numeric: true}, {title: 'Memory', numeric: true}]),
    models: makeMemoryTable(number(shard.index)),
  });
  title.addEventListener('click', () => {
    node.more.hidden = !node.more.hidden;
    title.setAttribute('aria-expanded', String(!node.more.hidden));
  });
  node.more.append(node.partitions, node.models, node.link);
  node.append(element('div', {class: 'shard-top'}, element('h3', {}, title), node.state), node.address, node.reason,
    node.cells, node.memory, node.resident, node.facts, node.more);
  return node;
}

function updateFacts(list, facts) {
  const create = () => element('div', {}, element('dt'), element('dd'));
  keyed(list, facts, ([label]) => label, create, (node, [label, value]) => {
    setText(node.children[0], label);
    setText(node.children[1], value);
  });
}

// A cell for each partition, the darker the busier.
function updateCells(list, partitions, rates, busiest) {
  const create = () => element('li', {}, element('i', {'aria-hidden': 'true'}), element('span'),
    element('span', {class: 'hidden'}));
  const items = partitions.map((partition, i) => ({partition, rate: rates?.partitions[i]?.gathered ?? null}));
  keyed(list, items, (item) => number(item.partition.index), create, (node, {partition, rate}) => {
    const share = busiest > 0 && rate !== null ? rate / busiest : 0;
    node.style.setProperty('--heat', `${Math.round(share * 100)}%`);
    setText(node.children[1], String(number(partition.index)));
    setText(node.children[2], `: ${perSecond(rate)} rows gathered`);
    setAttribute(node, 'title', `Partition ${number(partition.index)}: ${perSecond(rate)} rows gathered, ` +
      `${bytes(number(partition.table_bytes))}`);
  });
}

// What a shard does, as its log has it (storage.durability LOG).
function stateOf(log) {
  if (log?.recovering) {
    const total = number(log.recovery_bytes);
    return total === 0 ? 'recovering' : `recovering, ${Math.floor(100 * number(log.recovered_bytes) / total)} %`;
  }
  return log?.failure ? 'refuses changes' : 'serving';
}

function updateShard(node, shard, rates, busiest) {
  const up = shard.reachable;
  node.classList.toggle('down', !up);
  setText(node.state, up ? stateOf(shard.log) : 'out of reach');
  node.state.classList.toggle('bad', !up || Boolean(shard.log?.recovering || shard.log?.failure));
  setText(node.address, shard.address || 'in this process');
  node.reason.hidden = up && !shard.log?.failure;
  setText(node.reason, up ? shard.log?.failure ?? '' : shard.error || 'it does not answer');
  for (const part of [node.cells, node.memory, node.facts]) part.hidden = !up;
  node.link.hidden = !shard.http_address;
  setAttribute(node.link, 'href', shard.http_address ? `${location.protocol}//${shard.http_address}/` : null);
  setText(node.link, shard.http_address ? `Pages of this shard on ${shard.http_address}` : '');
  const used = number(shard.table_bytes);
  const budget = shard.memory ? 0 : number(shard.table_budget_bytes);  // where models are evicted, more is no fault
  updateCells(node.cells, shard.partitions, rates, busiest);
  updateMeter(node.memory, used, budget, budget > 0 ? `${bytes(used)} of ${bytes(budget)}` : bytes(used));
  updateMemory(node.resident, node.models, up ? shard.memory : null);
  updateFacts(node.facts, [
    ['Gathered', perSecond(rates?.gathered)], ['Updated', perSecond(rates?.updated)],
    ['Process', bytes(number(shard.resident_bytes))], ['Huge pages', bytes(number(shard.huge_page_bytes))],
    ['Queued', exact(number(shard.queued))], ['Batches', `${exact(number(shard.batches))}, ${bytes(number(shard.batch_bytes))}`],
    ['Up for', duration(number(shard.uptime_ms))], ['Models', exact(number(shard.models))],
    ...shard.log ? [['Log', bytes(number(shard.log.bytes))]] : [], ...memoryFacts(shard.memory),
  ]);
  updateTable(node.partitions, shard.partitions.map((partition, i) => ({
    key: number(partition.index),
    cells: [String(number(partition.index)), perSecond(rates?.partitions[i]?.gathered),
      perSecond(rates?.partitions[i]?.updated), bytes(number(partition.table_bytes))],
  })));
}

export function updateShards(stats, history) {
  const rates = history.shardRates;
  const busiest = Math.max(0, ...rates.flatMap((shard) => shard ? shard.partitions.map((one) => one.gathered) : []));
  const down = stats.shards.filter((shard) => !shard.reachable);
  const partitions = stats.shards.reduce((sum, shard) => sum + shard.partitions.length, 0);
  setText(byId('cluster-note'), down.length === 0
    ? `${plural(stats.shards.length, 'shard')}, ${plural(partitions, 'partition')}`
    : `out of reach: shard ${down.map((shard) => number(shard.index)).join(', ')}`);
  byId('scale').hidden = busiest === 0;
  setText(byId('scale-max'), `${count(busiest)} rows/s`);
  keyed(byId('shards'), stats.shards.map((shard, i) => ({shard, rates: rates[i] ?? null})),
    (item) => number(item.shard.index), (item) => makeShard(item.shard),
    (node, item) => updateShard(node, item.shard, item.rates, busiest));
}
