// The memory of a shard's SparseCores, where models may be evicted (`eviction` in the cluster's description). Bytes are
// those of each SparseCore, but for what is spilled.

import {makeMeter, makeTable, updateMeter, updateTable} from './dom.js';
import {bytes, exact, plural} from './format.js';
import {number} from './history.js';

const PLACES = {SPARSECORE: 'resident', HOST: 'in memory of the host', SPILLED: 'spilled to disk'};

// What is said of each model; its stacks are always in the same place.
function modelsOf(memory) {
  const models = new Map();
  for (const table of memory.tables) {
    if (!table.stack) continue;  // a batch: its place and its pin are not those of its model
    const model = models.get(table.model) ?? {name: table.model, place: table.place, pinned: table.pinned, bytes: 0, uses: 0};
    model.bytes += number(table.bytes);
    model.uses = number(table.uses);
    models.set(table.model, model);
  }
  return [...models.values()];
}

export const makeResident = () => makeMeter('Resident');

export const makeMemoryTable = (shard) => makeTable(`Models in the memory of shard ${shard}`,
  [{title: 'Model'}, {title: 'Where'}, {title: 'Size', numeric: true}, {title: 'Uses', numeric: true}, {title: 'Pinned'}]);

// `memory` is absent where models are not evicted.
export function updateMemory(meter, table, memory) {
  meter.hidden = !memory;
  table.hidden = !memory;
  if (!memory) return;
  const budget = number(memory.bytes);
  const used = budget - number(memory.free_bytes);
  updateMeter(meter, used, budget, `${bytes(used)} of ${bytes(budget)} on each SparseCore`);
  updateTable(table, modelsOf(memory).map((model) => ({key: model.name,
    cells: [model.name, PLACES[model.place] ?? model.place, bytes(model.bytes), exact(model.uses), model.pinned ? 'yes' : 'no']})));
}

export function memoryFacts(memory) {
  if (!memory) return [];
  const pinned = modelsOf(memory).filter((model) => model.pinned);
  return [['On host', bytes(number(memory.host_bytes))], ['Spilled', bytes(number(memory.spilled_bytes))],
    ['Pinned', pinned.length === 0 ? 'none' : `${plural(pinned.length, 'model')}, ${bytes(number(memory.pinned_bytes))}`],
    ['Evictions', exact(number(memory.evictions))]];
}
