"""What is wrong with a page to look at or to use, as JavaScript expressions that list it."""

# Everything a person can read that has not enough contrast with what is behind it (WCAG 2.1 AA), as text.
FAINT_TEXT = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] / 255 + under[i] * (1 - top[3] / 255));
  const ground = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const light = (color) => {
    const [r, g, b] = color.map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  for (const node of document.querySelectorAll('body *')) {
    const text = [...node.childNodes].filter((child) => child.nodeType === 3).map((child) => child.data).join('').trim();
    if (!text || !node.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (node.closest('.hidden, .skip, option, .blank')) continue;
    const style = getComputedStyle(node);
    const under = ground(node);
    const top = over(rgba(node instanceof SVGElement ? style.fill : style.color), under);
    const [a, b] = [light(top), light(under)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) faint.push(`${ratio.toFixed(2)} "${text.slice(0, 40)}" ${node.tagName}.${node.getAttribute('class')}`);
  }
  return faint;
})()"""

# Interactive elements, and charts, that have no name for a screen reader.
NAMELESS = """[...document.querySelectorAll('a, button, select, input, [tabindex], [role=meter], figure svg[role=img]')]
  .filter((node) => node.checkVisibility() && node.id !== 'main')
  .filter((node) => !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length))
  .map((node) => node.outerHTML.slice(0, 120))"""

# What reaches beyond the right edge, but for tables that scroll in themselves.
CUT_OFF = """[...document.querySelectorAll('header *, main *, footer *')]
  .filter((node) => node.checkVisibility() && !node.closest('.scroller table, .hidden, svg, option'))
  .filter((node) => node.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map((node) => node.outerHTML.slice(0, 120))"""

# Charts that show no line, or no number beside its name.
CHARTS_WITHOUT_VALUES = """[...document.querySelectorAll('figure.chart')].filter((figure) => figure.querySelector('.plot'))
  .filter((figure) => !figure.querySelector('.nothing').hidden || !figure.querySelector('.line[d*=L]')
    || [...figure.querySelectorAll('.legend b')].every((value) => value.textContent === '–'))
  .map((figure) => figure.querySelector('h3').textContent)"""

# Labels of axes that reach out of their picture, or into each other.
CUT_LABELS = """[...document.querySelectorAll('.plot')].flatMap((plot) => {
  const frame = plot.getBoundingClientRect();
  const labels = [...plot.querySelectorAll('.grid text')].map((text) => ({text: text.textContent, box: text.getBoundingClientRect()}));
  const out = labels.filter(({box}) => box.left < frame.left - 0.5 || box.right > frame.right + 0.5 || box.top < frame.top - 0.5 ||
    box.bottom > frame.bottom + 0.5);
  const over = labels.filter(({box}, i) => labels.some(({box: other}, j) => j > i && box.left < other.right && other.left < box.right &&
    box.top < other.bottom - 2 && other.top < box.bottom - 2));
  return [...out, ...over].map(({text}) => text);
})"""

# Text that is cut, or columns that lie beyond an edge, where nothing says so.
HIDDEN_WITHOUT_A_SIGN = """[...document.querySelectorAll('main *, header *')]
  .filter((node) => node.checkVisibility() && !node.closest('.hidden, svg, option, select, .segment, .cells'))
  .filter((node) => node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).overflowX !== 'visible')
  .filter((node) => !(node.matches('.scroller') ? node.querySelector('.beyond').checkVisibility() && node.matches('.more')
    : getComputedStyle(node).textOverflow === 'ellipsis'))
  .map((node) => node.outerHTML.slice(0, 120))"""
