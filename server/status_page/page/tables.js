// Models: the layout of their stacks, drawn, and what their batches needed.

import {byId, element, keyed, makeMeter, makeTable, setAttribute, setText, updateMeter, updateTable} from './dom.js';
import {bytes, count, exact, percent, plural} from './format.js';
import {number} from './history.js';

const TABLE_COLUMNS = [{title: 'Table'}, {title: 'Rows', numeric: true}, {title: 'Padded', numeric: true},
  {title: 'Width', numeric: true}, {title: 'First row', numeric: true}, {title: 'Rotation', numeric: true},
  {title: 'Features', numeric: true}, {title: 'Combiner'}, {title: 'Stored as'}];

// Everything that is to be said about a table, as [label, text].
function tableFacts(model, stack, table) {
  const config = model.config.tables.find((other) => other.name === table.name) ?? {};
  const features = stack.features.filter((feature) => feature.table === table.name);
  const padded = number(table.padded_vocabulary_size);
  const rows = number(table.vocabulary_size);
  return [
    ['Rows', exact(rows)],
    ['Padded', padded === rows ? exact(padded) : `${exact(padded)} (+${percent((padded - rows) / rows)})`],
    ['Width', number(table.embedding_dim) === number(stack.embedding_dim) ? exact(table.embedding_dim)
      : `${exact(table.embedding_dim)} of ${exact(stack.embedding_dim)}`],
    ['First row', exact(number(table.row_offset))],
    ['Rotation', exact(number(table.shard_rotation))],
    ['Features', exact(features.length)],
    ['Combiner', String(config.combiner ?? '').toLowerCase()],
    ['Stored as', String(config.storage_dtype ?? '').toLowerCase()],
  ];
}

// The stack of one partition as a bar: a segment for each table, as long as it has rows. One stop of the Tab key; the
// arrow keys go from table to table.
function makeBar(model, stack) {
  const readout = element('p', {class: 'readout'});
  const segments = stack.tables.map((table, i) => {
    const facts = tableFacts(model, stack, table);
    const text = facts.map(([label, value]) => `${label.toLowerCase()} ${value}`).join(' · ');
    const rows = number(table.padded_vocabulary_size);
    const rotation = number(table.shard_rotation);
    const segment = element('button', {type: 'button', class: 'segment', tabindex: i === 0 ? '0' : '-1',
      'aria-label': `${table.name}: ${text}`},
      element('span', {class: 'name', text: table.name}),
      element('span', {class: 'turn', text: rotation > 0 ? `↻${rotation}` : ''}),
      element('i', {class: 'padding'}));
    segment.style.flexGrow = String(rows);
    segment.lastChild.style.width = `${(1 - number(table.vocabulary_size) / rows) * 100}%`;
    const show = () => {
      readout.replaceChildren(element('b', {text: table.name}), ` ${text}`);
      for (const other of segments) other.classList.toggle('chosen', other === segment);
    };
    for (const event of ['pointerenter', 'focus', 'click']) segment.addEventListener(event, show);
    return segment;
  });
  const bar = element('div', {class: 'bar', role: 'toolbar', 'aria-label': `Tables of stack ${stack.name}, by rows`}, ...segments);
  segments[0].dispatchEvent(new Event('click'));
  bar.addEventListener('keydown', (event) => {
    const from = segments.indexOf(document.activeElement);
    const to = {ArrowRight: from + 1, ArrowLeft: from - 1, Home: 0, End: segments.length - 1}[event.key];
    if (from < 0 || to === undefined || !segments[to]) return;
    event.preventDefault();
    segments[from].tabIndex = -1;
    segments[to].tabIndex = 0;
    segments[to].focus();
  });
  return [bar, readout];
}

function makeStack(model, stack) {
  const table = makeTable(`Tables of stack ${stack.name}`, TABLE_COLUMNS);
  updateTable(table, stack.tables.map((one) => ({key: one.name,
    cells: [one.name, ...tableFacts(model, stack, one).map(([, value]) => value)]})));
  const slots = stack.slots.length ? `${stack.optimizer} (${stack.slots.join(', ')})` : stack.optimizer;
  const node = element('li', {class: 'stack'},
    element('h4', {text: stack.name}),
    element('p', {class: 'facts', text: [plural(stack.tables.length, 'table'), `width ${exact(stack.embedding_dim)}`,
      `${count(number(stack.rows_per_partition))} rows and ${bytes(number(stack.bytes_per_partition))} a partition`,
      slots].join(' · ')}),
    ...makeBar(model, stack));
  node.ids = makeMeter('Ids per partition');
  node.uniques = makeMeter('Unique ids per partition');
  node.needs = element('p', {class: 'facts'});
  node.append(element('div', {class: 'limits'}, node.ids, node.uniques), node.needs,
    element('details', {class: 'data'}, element('summary', {text: `Tables of ${stack.name}`}), table));
  return node;
}

// The largest need that was seen, against the limit.
function updateNeed(meter, largest, limit) {
  const limited = limit > 0;
  updateMeter(meter, largest, limit, limited
    ? `largest ${exact(largest)} of ${exact(limit)} (${percent(largest / limit)})` : `largest ${exact(largest)}, no limit`, 'over');
  meter.classList.toggle('unlimited', !limited);
}

// `slots`: of a batch, each with ids of its own; the fullest one's are counted.
function updateNeeds(node, needs, slots) {
  const batches = number(needs?.batches);
  updateNeed(node.ids, number(needs?.largest_ids_per_partition), number(needs?.max_ids_per_partition));
  updateNeed(node.uniques, number(needs?.largest_unique_ids_per_partition), number(needs?.max_unique_ids_per_partition));
  const ids = number(needs?.ids);
  const dropped = number(needs?.dropped_ids);
  setText(node.needs, batches === 0 ? 'No batch yet.' : [plural(batches, 'batch', 'batches'),
    `${count(ids)} ids, about ${percent(Math.min(1, slots * number(needs.unique_ids) / Math.max(1, ids)))} unique`,
    dropped > 0 ? `${exact(dropped)} dropped` : 'none dropped'].join(' · '));
  node.needs.classList.toggle('bad', dropped > 0);
}

function makeModel(model) {
  const plan = model.plan;
  const stacks = element('ul', {class: 'stacks'}, ...plan.stacks.map((stack) => makeStack(model, stack)));
  const lost = element('p', {class: 'facts bad', role: 'status'});
  return Object.assign(element('article', {class: 'model'}, element('h3', {text: model.config.name}), lost,
    element('p', {class: 'facts', text: [plural(model.config.tables.length, 'table'),
      plural(model.config.features.length, 'feature'), plural(plan.stacks.length, 'stack'),
      `${plan.shards} × ${plan.sparsecores_per_shard} = ${plural(plan.partitions, 'partition')}`,
      `${bytes(number(plan.table_bytes))} in all`].join(' · ')}),
    stacks), {lost, stackNodes: [...stacks.children], stackNames: plan.stacks.map((stack) => stack.name)});
}

export function updateModels(models, stats) {
  const place = byId('models');
  setAttribute(place, 'class', models.length === 0 ? 'empty' : null);
  if (models.length === 0) {
    keyed(place, ['empty'], (key) => key, () => element('p', {class: 'nothing',
      text: 'No model yet: this coordinator lists those that it has declared or served.'}), () => {});
    setText(byId('tables-note'), '');
    return;
  }
  setText(byId('tables-note'), `${plural(models.length, 'model')}. A bar is one partition, each table as long as it has ` +
    'rows; hatched: padding; ↻: rotation. Point at a table, or focus a bar and press the arrow keys.');
  keyed(place, models, (model) => `${model.model_id}/${model.plan.fingerprint}`, makeModel, (node, model) => {
    // One that comes back by itself says so, and not what an operator could do.
    setText(node.lost, model.recovery || model.lost || '');
    node.stackNodes.forEach((stack, i) => updateNeeds(stack, stats.stacks.find(
      (other) => other.model === model.config.name && other.stack === node.stackNames[i]), model.plan.sparsecores_per_shard));
  });
}
