// Adds the time of the reader's own zone to the title of a time that is pointed at or focused.
const told = (event) => {
  const time = event.target.closest?.('time');
  if (!time || time.dataset.told === time.dateTime) return;
  const here = new Date(time.dateTime).toLocaleString(undefined, {dateStyle: 'medium', timeStyle: 'long'});
  time.title = `${here}\n${time.dateTime.slice(0, 19).replace('T', ' ')} UTC`;
  time.dataset.told = time.dateTime;
};
document.addEventListener('pointerover', told);
document.addEventListener('focusin', told);
