// Chooses the colour scheme before anything is drawn: the remembered one, else the system's. `data-theme` is what was
// asked for, `data-scheme` what it comes to; the style sheet looks at the second alone.
(() => {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  globalThis.settleScheme = () => { root.dataset.scheme = root.dataset.theme ?? (system.matches ? "dark" : "light"); };
  try {
    const kept = localStorage.getItem("streamrl-theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch { /* storage may be forbidden; the system's scheme holds */ }
  settleScheme();
  system.addEventListener("change", settleScheme);
})();
