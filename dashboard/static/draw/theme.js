// Light or dark, as TensorBoard is; as the system is where TensorBoard does not tell.

export function watchTheme(onChange) {
  const preference = window.matchMedia('(prefers-color-scheme: dark)');
  let body = null;
  try {
    body = window.parent === window ? null : window.parent.document.body;
  } catch {
    body = null;
  }
  const apply = () => {
    const dark = body ? body.classList.contains('dark-mode') : preference.matches;
    const theme = dark ? 'dark' : 'light';
    if (document.documentElement.dataset.theme === theme) return;
    document.documentElement.dataset.theme = theme;
    onChange(theme);
  };
  apply();
  if (body) new MutationObserver(apply).observe(body, { attributes: true, attributeFilter: ['class'] });
  else preference.addEventListener('change', apply);
}

/** The colours that drawings on a canvas share with the style sheet. */
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    text: read('--text'),
    muted: read('--muted'),
    line: read('--line'),
    grid: read('--grid'),
    surface: read('--surface'),
    accent: read('--accent'),
    hatch: read('--hatch'),
    dark: document.documentElement.dataset.theme === 'dark',
  };
}
