// Browsers start no Worker for a page that was opened from the file system. The search runs in a
// hidden frame then, so that it works without a server.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    const inside = this.frame.contentWindow;
    window.addEventListener("message", (event) => {
      if (event.source === inside) {
        this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      }
    });
    inside.document.open();
    inside.document.write(`<html><body><script>
      postMessage = (message) => parent.postMessage(message, "*");
      importScripts = (...urls) => urls.reduce((before, url) => before.then(() =>
        new Promise((done) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = done;
          document.body.appendChild(script);
        })), Promise.resolve());
    <\/script><script src="${url}"><\/script></body></html>`);
    inside.document.close();
    this.ready = new Promise((done) => (inside.onload = done));
  }

  postMessage(data) {
    const inside = this.frame.contentWindow;
    this.ready.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.Worker = FrameWorker;
}
