// The guest's side of TensorBoard's message channel, by hand: its own library is an npm package.
// Messages are JSON strings {type, id, payload, error, isReply}; each message of the host is answered with its id.

const REPLY_SECS = 2;

export class Channel {
  constructor() {
    this.listeners = new Map();
    this.waiting = new Map();
    this.nextId = 0;
    const { port1, port2 } = new MessageChannel();
    this.port = port1;
    this.port.onmessage = (event) => this.receive(JSON.parse(event.data));
    window.parent.postMessage('experimental.bootstrap', '*', [port2]);
  }

  /** Calls `listener(payload)` whenever the host sends `type`. */
  listen(type, listener) {
    this.listeners.set(type, listener);
  }

  /** Asks the host; resolves to null if it does not answer (it may be another TensorBoard than we know). */
  ask(type, payload) {
    const id = this.nextId++;
    const answer = new Promise((resolve) => {
      this.waiting.set(id, resolve);
      setTimeout(() => resolve(null), REPLY_SECS * 1000);
    });
    this.port.postMessage(JSON.stringify({ type, id, payload, error: null, isReply: false }));
    return answer;
  }

  receive(message) {
    if (message.isReply) {
      this.waiting.get(message.id)?.(message.error ? null : message.payload);
      this.waiting.delete(message.id);
      return;
    }
    this.listeners.get(message.type)?.(message.payload);
    this.port.postMessage(JSON.stringify({ ...message, payload: null, error: null, isReply: true }));
  }
}
