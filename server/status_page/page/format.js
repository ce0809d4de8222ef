// Numbers as people read them. Null and what is no number become a dash.

const DASH = '–';
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

// Three digits at most: 7.35, 73.5, 735.
function short(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return value.toFixed(0);
  if (size >= 9.995) return value.toFixed(1);
  return value.toFixed(2);
}

function scaled(value, step, units) {
  let unit = 0;
  while (Math.abs(value) >= step * 0.9995 && unit + 1 < units.length) {
    value /= step;
    ++unit;
  }
  return {value, unit: units[unit], first: unit === 0};
}

// 12, 3.4k, 5.60M
export function count(number) {
  if (!known(number)) return DASH;
  const {value, unit, first} = scaled(number, 1000, ['', 'k', 'M', 'G', 'T']);
  return (first && Number.isInteger(value) ? String(value) : short(value)) + unit;
}

// 12,345
export const exact = (number) => known(number) ? Math.round(number).toLocaleString('en-US') : DASH;

export function bytes(number) {
  if (!known(number)) return DASH;
  const {value, unit, first} = scaled(number, 1024, ['B', 'KiB', 'MiB', 'GiB', 'TiB']);
  return `${first ? value.toFixed(0) : short(value)} ${unit}`;
}

export function seconds(number) {
  if (!known(number)) return DASH;
  if (number === 0) return '0 s';
  if (number < 0.9995e-3) return `${short(number * 1e6)} µs`;
  if (number < 0.9995) return `${short(number * 1e3)} ms`;
  return `${short(number)} s`;
}

export const percent = (share) => !known(share) ? DASH : `${short(share * 100)} %`;

// 42 s, 3 min 7 s, 5 h 2 min, 3 d 4 h
export function duration(ms) {
  if (!known(ms)) return DASH;
  const s = Math.floor(ms / 1000);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}

export const perSecond = (number) => known(number) ? `${count(number)}/s` : DASH;
export const bytesPerSecond = (number) => known(number) ? `${bytes(number)}/s` : DASH;

// "1 table", "3 tables"
export const plural = (number, word, words = `${word}s`) => `${exact(number)} ${number === 1 ? word : words}`;
