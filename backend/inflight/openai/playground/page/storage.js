// What the browser keeps: settings, presets and conversations in localStorage, the rest in the tab's sessionStorage.

const SAVED = "inflight-playground";

/** Return the value stored in the browser under a name; null if there is no value or no storage. */
function stored(name, place = "localStorage") {
  try {
    return window[place].getItem(`${SAVED}/${name}`);
  } catch {
    return null;
  }
}

/** Return a stored JSON value; null if there is none or it cannot be read. */
function storedJson(name) {
  try {
    return JSON.parse(stored(name) ?? "null");
  } catch {
    return null;
  }
}

/** Store a text in the browser; return false if that is not possible. */
function store(name, text, place = "localStorage") {
  try {
    window[place].setItem(`${SAVED}/${name}`, text);
    return true;
  } catch {
    return false;
  }
}

/** Remove a value from the browser. */
function forget(name) {
  try {
    localStorage.removeItem(`${SAVED}/${name}`);
  } catch {
    // Without storage there is nothing to remove.
  }
}

/** Return the names of stored values that begin with `prefix`. */
function storedNames(prefix) {
  try {
    const names = Object.keys(localStorage).filter((name) => name.startsWith(`${SAVED}/${prefix}`));
    return names.map((name) => name.slice(SAVED.length + 1));
  } catch {
    return [];
  }
}
