// Making and updating elements. Whatever comes from the server becomes text, never markup.

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'text') node.textContent = value;
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children);
  return node;
}

// element('p', {class: 'note', text: 'a'}, child, ...); `onclick` and the like take functions.
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

// Touches the page only where something changes, so that selections and screen readers stay calm.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null) {
    node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) {
    node.setAttribute(name, value);
  }
}

// Makes the children of `parent` one per item, in order: those of known keys stay what they are (and keep the focus),
// new ones come from create(item), and update(child, item) is called for each.
export function keyed(parent, items, keyOf, create, update) {
  const known = parent.keyedChildren ?? new Map();
  const next = new Map();
  let before = null;
  for (const item of items) {
    const key = keyOf(item);
    const child = known.get(key) ?? create(item);
    known.delete(key);
    next.set(key, child);
    const place = before ? before.nextSibling : parent.firstChild;
    if (place !== child) parent.insertBefore(child, place);
    update(child, item);
    before = child;
  }
  for (const child of known.values()) child.remove();
  parent.keyedChildren = next;
}

// A table of plain cells: columns of {title, numeric, wide}. `rows` of updateTable hold texts or, for a bar behind the
// text, {text, share: 0 to 1}.
export function makeTable(caption, columns) {
  const head = element('tr', {}, ...columns.map(
    (column) => element('th', {scope: 'col', class: column.numeric ? 'number' : null, text: column.title})));
  const body = element('tbody');
  const table = element('table', {}, element('caption', {class: 'hidden', text: caption}),
    element('thead', {}, head), body);
  const scroller = element('div', {class: 'scroller', tabindex: '0', role: 'region', 'aria-label': caption}, table,
    element('p', {class: 'beyond', 'aria-hidden': 'true', text: '↔ Scroll sideways for all columns'}));
  // Says so where columns lie beyond the edge.
  const look = () => {
    const seen = scroller.scrollLeft + scroller.clientWidth;
    scroller.classList.toggle('wide', scroller.scrollWidth > scroller.clientWidth + 1);
    scroller.classList.toggle('more', seen < scroller.scrollWidth - 1);
    scroller.style.setProperty('--seen', `${seen}px`);
  };
  scroller.addEventListener('scroll', look);
  const observer = new ResizeObserver(look);
  observer.observe(scroller);
  observer.observe(table);
  scroller.tableBody = body;
  scroller.tableColumns = columns;
  return scroller;
}

// rows: {key, cells, class}; the first cell heads its row.
export function updateTable(scroller, rows) {
  const columns = scroller.tableColumns;
  const create = () => element('tr', {}, ...columns.map((column, i) => element(i === 0 ? 'th' : 'td',
    {scope: i === 0 ? 'row' : null, class: column.numeric ? 'number' : null}, element('span'))));
  keyed(scroller.tableBody, rows, (row) => row.key, create, (node, row) => {
    setAttribute(node, 'class', row.class ?? null);
    row.cells.forEach((cell, i) => {
      const rich = typeof cell === 'object';
      setText(node.children[i].firstChild, rich ? cell.text : cell);
      if (!rich) return;
      node.children[i].classList.add('share');
      node.children[i].style.setProperty('--share', `${Math.min(1, cell.share) * 100}%`);
    });
  });
}

// A bar that says how full something is.
export function makeMeter(label) {
  const bar = element('div', {class: 'meter', role: 'meter', 'aria-label': label, 'aria-valuemin': '0'},
    element('i'));
  const value = element('span', {class: 'value'});
  return Object.assign(element('div', {class: 'metered'}, element('span', {class: 'label', text: label}), value, bar),
    {meterBar: bar, meterValue: value});
}

// `limit` 0: there is none. `style`: a class of page.css for what is nearly full.
export function updateMeter(meter, value, limit, text, style = 'full') {
  const share = limit > 0 ? Math.min(1, value / limit) : 0;
  setText(meter.meterValue, text);
  setAttribute(meter.meterBar, 'aria-valuenow', Math.round(value));
  setAttribute(meter.meterBar, 'aria-valuemax', Math.round(Math.max(limit, value)));
  setAttribute(meter.meterBar, 'aria-valuetext', text);
  meter.meterBar.classList.toggle(style, share > 0.9);
  meter.meterBar.firstChild.style.width = share > 0 ? `max(2px, ${share * 100}%)` : '0';
}
