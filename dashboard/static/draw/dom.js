// Building elements. Names of runs, tags and layers come from event files: they only ever become text nodes and
// attribute values here, never markup.

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'class') node.className = value;
    else if (name === 'data') Object.assign(node.dataset, value);
    else if (name === 'style') Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function button(text, title, onclick, extra = {}) {
  return el('button', { type: 'button', class: 'quiet', title, onclick, ...extra }, text);
}

/** Gives `select` the options [{value, label, group}] and a value, leaving it alone if nothing changed. */
export function fillSelect(select, options, value) {
  const signature = JSON.stringify(options);
  if (select.dataset.signature !== signature) {
    select.dataset.signature = signature;
    select.replaceChildren();
    const groups = new Map();
    for (const option of options) {
      let parent = select;
      if (option.group) {
        if (!groups.has(option.group)) {
          groups.set(option.group, el('optgroup', { label: option.group }));
          select.append(groups.get(option.group));
        }
        parent = groups.get(option.group);
      }
      parent.append(el('option', { value: option.value }, option.label));
    }
  }
  select.value = value ?? '';
}

/** A row of buttons of which one is pressed. Returns {node, show(value)}. */
export function segmented(label, options, onChoose) {
  const buttons = options.map(({ value, text, title }) =>
    el('button', { type: 'button', title, data: { value }, onclick: () => onChoose(value) }, text));
  return {
    node: el('div', { class: 'segmented', role: 'group', 'aria-label': label }, ...buttons),
    show(value) {
      for (const button of buttons) button.setAttribute('aria-pressed', String(button.dataset.value === value));
    },
  };
}

/** Sizes a canvas for the screen's pixels and returns its context, in CSS pixels. */
export function prepareCanvas(canvas, width, height, ratio = window.devicePixelRatio || 1) {
  const [deviceWidth, deviceHeight] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== deviceWidth) canvas.width = deviceWidth;
  if (canvas.height !== deviceHeight) canvas.height = deviceHeight;
  if (canvas.style) {
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
