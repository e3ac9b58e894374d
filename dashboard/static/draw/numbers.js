// How numbers are written, and where axes get their ticks.

const SUPERSCRIPTS = { '-': '⁻', 0: '⁰', 1: '¹', 2: '²', 3: '³', 4: '⁴', 5: '⁵', 6: '⁶', 7: '⁷', 8: '⁸', 9: '⁹' };

/** 10⁻³ for -3. */
export function powerOfTen(exponent) {
  return `10${String(exponent).replace(/./g, (digit) => SUPERSCRIPTS[digit])}`;
}

export function formatStep(step) {
  return Math.round(step).toLocaleString('en-US');
}

/** Four digits, as short as they can be read. */
export function formatValue(value) {
  if (value === 0) return '0';
  if (!Number.isFinite(value)) return Number.isNaN(value) ? 'NaN' : value > 0 ? 'Inf' : '−Inf';
  const size = Math.abs(value);
  const text = size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(4))) : value.toExponential(3);
  return text.replace(/^-/, '−').replace('e+', 'e');
}

export function formatSigned(value, digits = 2) {
  const text = Math.abs(value).toFixed(digits);
  return Number(text) === 0 ? text : `${value < 0 ? '−' : '+'}${text}`;
}

/** About `count` round numbers within [low, high]; whole ones if `whole`. */
export function ticks(low, high, count, whole = false) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const result = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) {
    result.push(Number((index * step).toPrecision(12)));
  }
  return result;
}

/** Ticks of a log10 axis, as [{at, label}]: powers of ten, and 2 and 5 between them where only few decades show. */
export function logTicks(low, high, count) {
  const stride = Math.max(1, Math.ceil((high - low) / Math.max(1, count)));
  const decades = [];
  for (let at = Math.ceil(low / stride) * stride; at <= high; at += stride) decades.push(at);
  if (decades.length >= 2) return decades.map((at) => ({ at: at + 0, label: powerOfTen(at + 0) }));
  const result = [];
  for (let decade = Math.floor(low); decade <= Math.ceil(high); decade++) {
    for (const factor of [1, 2, 5]) {
      const at = decade + Math.log10(factor);
      if (at >= low && at <= high) result.push({ at, label: formatValue(factor * 10 ** decade) });
    }
  }
  if (result.length > 2) return result;
  return ticks(10 ** low, 10 ** high, count).map((value) => ({ at: Math.log10(value), label: formatValue(value) }));
}

/** Writes large steps briefly on an axis: 20k, 1.5M. */
export function shortStep(step) {
  const size = Math.abs(step);
  if (size >= 1e6) return `${Number((step / 1e6).toPrecision(4))}M`;
  if (size >= 1e4) return `${Number((step / 1e3).toPrecision(4))}k`;
  return formatStep(step);
}
